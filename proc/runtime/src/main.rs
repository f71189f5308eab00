//! The runtime of an elastic process: a freestanding program that loads another
//! one into its own address space and stands between it and the kernel.
//!
//! - [`start`], [`load`], [`vdso`]: from the kernel's entry to the program's
//! - [`intercept`], [`calls`]: the program's system calls, which the kernel passes to the runtime
//! - [`signal`], [`frame`], [`xstate`], [`context`]: its signals and its state
//! - [`thread`]: its threads
//! - [`space`], [`memory`]: its address space, and access to it
//! - [`control`], [`descriptors`], [`program`]: launcher, own descriptors, name
//! - [`engine`]: stretch, pull, push, jump
//! - [`own_calls`], [`lock`], [`log`], [`image`], [`intrinsics`]: what a C library
//!   would have been for
//!
//! There is no C library and no thread-local storage: handlers run with the FS
//! base of the program.
#![no_std]
#![no_main]

mod calls;
mod context;
mod control;
mod descriptors;
mod engine;
mod frame;
mod image;
mod initial_stack;
mod intercept;
mod intrinsics;
mod load;
mod lock;
mod log;
mod memory;
mod own_calls;
mod program;
mod signal;
mod space;
mod start;
mod thread;
mod vdso;
mod xstate;

#[panic_handler]
fn panic(information: &core::panic::PanicInfo<'_>) -> ! {
    log::fail(
        weft_proc::boot::EXIT_INTERNAL,
        format_args!("the runtime's state is inconsistent: {information}"),
    )
}
