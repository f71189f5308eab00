//! Where the kernel enters the runtime and where the runtime leaves it.
//!
//! Three short stretches of assembly, each restartable: a signal that interrupts
//! one between its test of [`Inbox::pending`](crate::thread::Inbox) and its
//! `syscall` instruction would be overlooked, so the handler moves RIP to the
//! stretch's other exit (see [`redirect`]).
//!
//! - `weft_signal_entry` runs the handler, then *leaves*: if something is
//!   pending it is delivered first, else `rt_sigreturn`.
//! - `weft_call` runs a system call for the program, unless something is
//!   pending: then it returns [`RESTART`](crate::calls::RESTART) without having
//!   run it. The kernel's own restart (`SA_RESTART`) puts RIP on the `syscall`
//!   instruction again and so takes the same exit.
//! - `weft_clone` makes a thread that starts on a stack of its own.

use core::arch::global_asm;

use crate::frame::{Frame, SignalInfo};
use crate::thread::{BLOCK_BYTES, Thread};

global_asm!(
    r#"
    .text
    .globl weft_signal_entry, weft_restorer
    .globl weft_leave_start, weft_leave_end, weft_leave_again
    .globl weft_call, weft_call_start, weft_call_instruction, weft_call_abort
    .globl weft_clone

    # handler(signal, info, frame)
weft_signal_entry:
    mov rbx, rdx
    sub rsp, 8
    call weft_signal
    test al, al
    jz 2f
1:  mov rcx, rbx
    and rcx, -{block}
weft_leave_start:
    cmp dword ptr [rcx], 0
    jne weft_leave_again
2:  mov rsp, rbx
    mov eax, 15
weft_leave_end:
    syscall
    ud2
weft_leave_again:
    mov rsp, rbx
    mov rdi, rbx
    call weft_deliver_pending
    jmp 1b

    # Never returned to: the entry above leaves by itself.
weft_restorer:
    mov eax, 15
    syscall
    ud2

    # weft_call(number, arguments, pending)
weft_call:
    push rbx
    mov rbx, rdx
    mov rax, rdi
    mov r11, rsi
    mov rdi, [r11]
    mov rsi, [r11 + 8]
    mov rdx, [r11 + 16]
    mov r10, [r11 + 24]
    mov r8, [r11 + 32]
    mov r9, [r11 + 40]
weft_call_start:
    cmp dword ptr [rbx], 0
    jne weft_call_abort
weft_call_instruction:
    syscall
    pop rbx
    ret
weft_call_abort:
    mov rax, -512
    pop rbx
    ret

    # weft_clone(number, arguments, pending)
weft_clone:
    push rbx
    mov rbx, rdx
    mov rax, rdi
    mov r11, rsi
    mov rdi, [r11]
    mov rsi, [r11 + 8]
    mov rdx, [r11 + 16]
    mov r10, [r11 + 24]
    mov r8, [r11 + 32]
weft_clone_start:
    cmp dword ptr [rbx], 0
    jne weft_call_abort
weft_clone_instruction:
    syscall
    test rax, rax
    jz 3f
    pop rbx
    ret
3:  xor ebp, ebp
    mov rdi, rsp
    call weft_child
    ud2
"#,
    block = const BLOCK_BYTES,
);

unsafe extern "C" {
    static weft_leave_start: u8;
    static weft_leave_end: u8;
    static weft_leave_again: u8;
    static weft_call_start: u8;
    static weft_call_instruction: u8;
    static weft_call_abort: u8;
    static weft_clone_start: u8;
    static weft_clone_instruction: u8;
    fn weft_signal_entry();
    fn weft_restorer();
    fn weft_call(number: usize, arguments: *const usize, pending: *const u32) -> isize;
    fn weft_clone(number: usize, arguments: *const usize, pending: *const u32) -> isize;
}

/// The handler for every signal that the runtime takes.
pub fn signal_entry() -> usize {
    weft_signal_entry as *const () as usize
}

/// The restorer that goes with it.
pub fn restorer() -> usize {
    weft_restorer as *const () as usize
}

/// Runs a system call for the program on this thread. Blocks as long as the call
/// does; a signal for the program ends it.
///
/// # Safety
/// The call's effects on memory must be those the program asked for.
pub unsafe fn call(thread: &Thread, number: usize, arguments: &[usize; 6]) -> isize {
    let pending = thread.inbox().pending.as_ptr();
    // SAFETY: the assembly follows the C convention; the caller vouches for the
    // system call.
    unsafe { weft_call(number, arguments.as_ptr(), pending) }
}

/// Makes a thread or process, by `clone` or `clone3`, that starts in `weft_child`
/// on a stack of its own.
///
/// # Safety
/// The stack in the arguments is the alternate stack of a fresh block.
pub unsafe fn clone(thread: &Thread, number: usize, arguments: &[usize; 6]) -> isize {
    let pending = thread.inbox().pending.as_ptr();
    // SAFETY: the child runs on memory of its own, as the caller vouches.
    unsafe { weft_clone(number, arguments.as_ptr(), pending) }
}

/// Moves RIP out of a restartable stretch that a signal interrupted. Call it
/// after setting a pending bit.
pub fn redirect(frame: &mut Frame) {
    let rip = frame.registers.rip;
    let leave = &raw const weft_leave_start as usize..=&raw const weft_leave_end as usize;
    let call = &raw const weft_call_start as usize..=&raw const weft_call_instruction as usize;
    let clone = &raw const weft_clone_start as usize..=&raw const weft_clone_instruction as usize;
    if leave.contains(&rip) {
        frame.registers.rip = &raw const weft_leave_again as usize;
    } else if call.contains(&rip) || clone.contains(&rip) {
        frame.registers.rip = &raw const weft_call_abort as usize;
    }
}

/// Called by the assembly on the way out when something is pending.
#[unsafe(no_mangle)]
extern "C" fn weft_deliver_pending(frame: &mut Frame) {
    // SAFETY: the frame lies on the alternate stack of its thread, and nothing
    // else of the runtime is active on it.
    let thread = unsafe { Thread::at(core::ptr::from_ref(frame) as usize) };
    super::deliver_pending(thread, frame);
}

/// Called by the assembly for every signal; true: return to the program.
#[unsafe(no_mangle)]
extern "C" fn weft_signal(_signal: i32, info: &mut SignalInfo, frame: &mut Frame) -> bool {
    super::handle(info, frame)
}
