# A guest of a few instructions that does what is typed on its serial port: a
# Multiboot 1 kernel (Multiboot Specification 0.6.96) for the suite `vm`.
#
#   q  powers off          x  leaves through the debug exit port, code 43
#   r  resets              d  does not listen to the power button any more
#   t  triple faults       R  resets when the power button is pressed
#   F  resets by port 0x92 I  resets by an INIT to its own CPU
#   anything else is written back
#
# It says `ready` at the start, and powers off when the power button is pressed.

.set MAGIC, 0x1badb002
.set SERIAL, 0x3f8
.set SERIAL_STATUS, 0x3fd
.set SLEEP_CONTROL, 0x600
.set RESET, 0x602
.set EVENTS, 0x603

    .text
    .balign 4
    .long MAGIC
    .long 0
    .long -MAGIC

    .globl _start
_start:
    mov $0x90000, %esp
    xor %ebp, %ebp              # 1: deaf to the power button
    xor %ebx, %ebx              # 1: the power button resets
    mov $greeting, %esi
1:  lodsb
    test %al, %al
    jz loop
    call put
    jmp 1b

loop:
    test %ebp, %ebp
    jnz 2f
    mov $EVENTS, %dx
    in %dx, %al
    test $1, %al
    jnz pressed
2:  mov $SERIAL_STATUS, %dx
    in %dx, %al
    test $1, %al
    jz loop
    mov $SERIAL, %dx
    in %dx, %al
    cmp $'q', %al
    je power_off
    cmp $'r', %al
    je reset
    cmp $'t', %al
    je triple_fault
    cmp $'F', %al
    je fast_reset
    cmp $'I', %al
    je init
    cmp $'x', %al
    je debug_exit
    cmp $'R', %al
    jne 3f
    mov $1, %ebx
3:  cmp $'d', %al
    jne 4f
    mov $1, %ebp
4:  call put
    jmp loop

put:
    mov $SERIAL, %dx
    out %al, %dx
    ret

pressed:
    test %ebx, %ebx
    jnz reset
power_off:
    mov $0x34, %al              # SLP_EN and type 5
    mov $SLEEP_CONTROL, %dx
    out %al, %dx
    jmp .

reset:
    mov $1, %al
    mov $RESET, %dx
    out %al, %dx
    jmp .

fast_reset:
    in $0x92, %al
    or $1, %al
    out %al, $0x92
    jmp .

init:                           # physical destination 0
    movl $0, 0xfee00310
    movl $0x4500, 0xfee00300
    jmp .

debug_exit:
    mov $0x15, %eax
    out %eax, $0xf4
    jmp .

triple_fault:
    lidt no_table
    ud2
    jmp .

greeting:
    .asciz "ready\r\n"
no_table:
    .word 0
    .long 0
    .section .note.GNU-stack, "", @progbits
