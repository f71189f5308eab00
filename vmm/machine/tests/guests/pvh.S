/* Entry of a PVH kernel: a note of type XEN_ELFNOTE_PHYS32_ENTRY tells it. */

	.section .note.Xen, "a", @note
	.long 4
	.long 4
	.long 18
	.asciz "Xen"
	.long start

	.text
	.globl start
start:
	mov $stack_top, %esp
	push %ebx
	call pvh_main
1:	hlt
	jmp 1b

	.bss
	.balign 16
	.skip 4096
stack_top:
	.section .note.GNU-stack, "", @progbits
