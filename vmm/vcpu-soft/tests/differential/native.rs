//! The native side: sequences at fixed addresses of this process, between loads
//! and stores of all registers.

use std::sync::{Mutex, MutexGuard, PoisonError};

use iced_x86::code_asm::*;

use super::support::assemble;
use super::{CONTEXT, END, MEMORY_AT, MEMORY_SIZE, SEQUENCES_AT, SLOT, SLOTS, STUBS_AT};

/// Registers, flags, the FXSAVE area and the rest of AVX, at `CONTEXT`.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Context {
    pub fpu: [u8; 512],
    /// The upper halves of the YMM registers.
    pub high: [u8; 256],
    pub registers: [u64; 16],
    pub flags: u64,
    pub host_stack: u64,
    pub spare: [u64; 6],
}

/// Pages at a fixed address.
fn map(address: u64, size: usize, protection: i32) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: nothing of this process is there, or the call fails.
    let got = unsafe { libc::mmap(address as *mut _, size, protection, flags, -1, 0) };
    assert_eq!(got as u64, address, "no pages at {address:#x}");
}

fn protect_pages(address: u64, size: usize, protection: i32) {
    // SAFETY: pages that `map` made, which hold no Rust object.
    let done = unsafe { libc::mprotect(address as *mut _, size, protection) };
    assert_eq!(done, 0);
}

pub fn put(address: u64, bytes: &[u8]) {
    // SAFETY: `map` made these pages, and nothing else uses them.
    unsafe { std::ptr::copy(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

pub fn native_memory() -> Vec<u8> {
    let mut bytes = vec![0; MEMORY_SIZE];
    // SAFETY: as in `put`.
    unsafe { std::ptr::copy(MEMORY_AT as *const u8, bytes.as_mut_ptr(), MEMORY_SIZE) };
    bytes
}

/// The native side. Its addresses are fixed: one at a time.
pub struct Native {
    enter: u64,
    leave: u64,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and used by nobody any more.
        unsafe {
            libc::munmap(MEMORY_AT as *mut _, MEMORY_SIZE);
            libc::munmap(CONTEXT as *mut _, 4096);
            libc::munmap(SEQUENCES_AT as *mut _, SLOT as usize * SLOTS + 4096);
        }
    }
}

const GENERAL: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

const WIDE: [AsmRegisterYmm; 16] = [
    ymm0, ymm1, ymm2, ymm3, ymm4, ymm5, ymm6, ymm7, ymm8, ymm9, ymm10, ymm11, ymm12, ymm13, ymm14,
    ymm15,
];

fn high_field(number: usize) -> u64 {
    field(std::mem::offset_of!(Context, high) + 16 * number)
}

fn field(offset: usize) -> u64 {
    CONTEXT + offset as u64
}

fn register_field(number: usize) -> u64 {
    field(std::mem::offset_of!(Context, registers) + 8 * number)
}

impl Native {
    /// With or without AVX.
    pub fn new(avx: bool) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        map(MEMORY_AT, MEMORY_SIZE, libc::PROT_READ | libc::PROT_WRITE);
        map(CONTEXT, 4096, libc::PROT_READ | libc::PROT_WRITE);
        map(
            SEQUENCES_AT,
            SLOT as usize * SLOTS + 4096,
            libc::PROT_READ | libc::PROT_WRITE,
        );
        let flags = field(std::mem::offset_of!(Context, flags));
        let host_stack = field(std::mem::offset_of!(Context, host_stack));
        let saved = [rbx, rbp, r12, r13, r14, r15];
        let enter = assemble(64, STUBS_AT, |a| {
            for register in saved {
                a.push(register).unwrap();
            }
            a.push(rdi).unwrap();
            a.mov(qword_ptr(host_stack), rsp).unwrap();
            a.fxrstor64(ptr(CONTEXT)).unwrap();
            for (number, register) in WIDE.into_iter().enumerate().filter(|_| avx) {
                let half = xmmword_ptr(high_field(number));
                a.vinsertf128(register, register, half, 1).unwrap();
            }
            a.push(qword_ptr(flags)).unwrap();
            a.popfq().unwrap();
            for (number, register) in GENERAL.into_iter().enumerate() {
                a.mov(register, qword_ptr(register_field(number))).unwrap();
            }
            a.jmp(qword_ptr(field(std::mem::offset_of!(Context, spare))))
                .unwrap();
        });
        let leave_at = STUBS_AT + enter.len() as u64;
        let leave = assemble(64, leave_at, |a| {
            for (number, register) in GENERAL.into_iter().enumerate() {
                a.mov(qword_ptr(register_field(number)), register).unwrap();
            }
            a.mov(rsp, qword_ptr(host_stack)).unwrap();
            a.pushfq().unwrap();
            a.pop(qword_ptr(flags)).unwrap();
            a.fxsave64(ptr(CONTEXT)).unwrap();
            for (number, register) in WIDE.into_iter().enumerate().filter(|_| avx) {
                let half = xmmword_ptr(high_field(number));
                a.vextractf128(half, register, 1).unwrap();
            }
            if avx {
                a.vzeroupper().unwrap();
            }
            a.fninit().unwrap();
            a.mov(
                dword_ptr(field(std::mem::offset_of!(Context, spare) + 8)),
                0x1f80,
            )
            .unwrap();
            a.ldmxcsr(dword_ptr(field(std::mem::offset_of!(Context, spare) + 8)))
                .unwrap();
            a.cld().unwrap();
            a.pop(rdi).unwrap();
            for register in saved.into_iter().rev() {
                a.pop(register).unwrap();
            }
            a.ret().unwrap();
        });
        put(STUBS_AT, &enter);
        put(leave_at, &leave);
        Self {
            enter: STUBS_AT,
            leave: leave_at,
            _alone: alone,
        }
    }

    pub fn writable(&self) {
        let size = SLOT as usize * SLOTS + 4096;
        protect_pages(SEQUENCES_AT, size, libc::PROT_READ | libc::PROT_WRITE);
    }

    pub fn executable(&self) {
        let size = SLOT as usize * SLOTS + 4096;
        protect_pages(SEQUENCES_AT, size, libc::PROT_READ | libc::PROT_EXEC);
    }

    pub fn run(&self, sequence: u64, context: &Context, memory: &[u8]) -> Context {
        let mut context = *context;
        context.spare[0] = sequence;
        put(MEMORY_AT, memory);
        // SAFETY: the context's pages are ours alone, and so aligned.
        unsafe { (CONTEXT as *mut Context).write(context) };
        // SAFETY: the stub saves what the C convention asks for; sequences use
        // memory at MEMORY_AT only.
        unsafe { std::mem::transmute::<u64, extern "C" fn()>(self.enter)() };
        // SAFETY: the context's pages are ours alone, and so aligned.
        unsafe { (CONTEXT as *const Context).read() }
    }

    pub fn end(&self, address: u64) -> [u8; END] {
        let distance = self.leave.wrapping_sub(address + END as u64) as u32;
        let [a, b, c, d] = distance.to_le_bytes();
        [0xe9, a, b, c, d]
    }
}
