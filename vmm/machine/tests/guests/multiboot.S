/* Entry of a Multiboot 1 kernel (Multiboot Specification 0.6.96, 3.1 and 3.2). */

#define MAGIC 0x1badb002
#ifdef ADDRESSES
#define FLAGS 0x10003
#else
#define FLAGS 0x3
#endif

	.section .header, "a"
	.balign 4
header:
	.long MAGIC
	.long FLAGS
	.long -(MAGIC + FLAGS)
#ifdef ADDRESSES
	.long header
	.long image_start
	.long image_end
	.long bss_end
	.long start
#endif

	.text
	.globl start
start:
	mov $stack_top, %esp
	push %ebx
	push %eax
	call multiboot_main
1:	hlt
	jmp 1b

	.bss
	.balign 16
	.skip 4096
stack_top:
	.section .note.GNU-stack, "", @progbits
