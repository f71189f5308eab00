//! Marshalling against the kernel.
