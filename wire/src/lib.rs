//! (being written)
#![cfg_attr(not(any(test, feature = "std")), no_std)]
