//! Memory attached to the DSM through userfaultfd (kernel document
//! `admin-guide/mm/userfaultfd`).
//!
//! - [`uffd`]: the thin wrapper over the kernel's interface: ioctl numbers and
//!   structure sizes are checked at compile time, each errno is classed.
//! - [`space`]: what an engine does with pages of a registered range: install,
//!   zero, protect, allow, copy out, drop, and ask which are present.
//!
//! - [`shared`]: the other front end, for shared memory that KVM uses: faults are
//!   read from the descriptor, those that the kernel takes as well.
//!
//! The front end of an elastic process is the in-thread one: with `UFFD_FEATURE_SIGBUS` a fault on a
//! missing or write-protected page becomes a SIGBUS of the thread that touched
//! it, which resolves the fault itself inside its handler. `USER_MODE_ONLY` is
//! always set, so that no privilege is needed; the price is that a system call
//! that touches a missing page fails with EFAULT, which is why the elastic
//! process copies system call arguments through buffers.
//!
//! Registering memory is the unsafe act (from then on a touch may signal);
//! filling it is not: the kernel refuses to overwrite a page that is there.
#![cfg_attr(not(test), no_std)]

pub mod shared;
pub mod space;
pub mod uffd;

/// Bytes in a page; the only size that Weft works with.
pub const PAGE_SIZE: usize = 4096;
