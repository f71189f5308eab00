//! What cannot work in an elastic process and whose absence programs expect.
//! Each gets the answer of a kernel that was built without it, or without the
//! hardware for it, because that is the answer that callers have a way around.

use super::Class;
use linux_raw_sys::errno::{EINVAL, ENOSPC, ENOSYS, EPERM};
use linux_raw_sys::general::*;

const fn no(nr: u32, errno: u32) -> (u32, Class) {
    (nr, Class::Refused(errno as i32))
}

pub(super) const REFUSED: &[(u32, Class)] = &[
    // The kernel would read and write the program's pages later, by itself, when
    // they may be on another node; nobody could bring them back in time.
    no(__NR_io_uring_setup, ENOSYS),
    no(__NR_io_uring_enter, ENOSYS),
    no(__NR_io_uring_register, ENOSYS),
    no(__NR_io_setup, ENOSYS),
    no(__NR_io_destroy, ENOSYS),
    no(__NR_io_submit, ENOSYS),
    no(__NR_io_cancel, ENOSYS),
    no(__NR_io_getevents, ENOSYS),
    no(__NR_io_pgetevents, ENOSYS),
    // Faults of the program are the pager's; a mapping has one userfaultfd.
    no(__NR_userfaultfd, ENOSYS),
    // Would drop or move pages without the page directory knowing.
    no(__NR_process_madvise, ENOSYS),
    // The kernel writes the CPU number into memory that may be elsewhere. The
    // C library does without.
    no(__NR_rseq, ENOSYS),
    // Which NUMA node of one host holds a page means nothing across hosts.
    no(__NR_mbind, ENOSYS),
    no(__NR_set_mempolicy, ENOSYS),
    no(__NR_get_mempolicy, ENOSYS),
    no(__NR_set_mempolicy_home_node, ENOSYS),
    no(__NR_migrate_pages, ENOSYS),
    no(__NR_move_pages, ENOSYS),
    // Keys, shadow stacks and sealed mappings are properties of one host's page
    // tables that other nodes could not honour.
    no(__NR_pkey_alloc, ENOSPC),
    no(__NR_pkey_free, EINVAL),
    no(__NR_map_shadow_stack, ENOSYS),
    no(__NR_mseal, ENOSYS),
    // Local descriptor tables and port permissions do not travel with a jump.
    no(__NR_modify_ldt, ENOSYS),
    no(__NR_iopl, EPERM),
    no(__NR_ioperm, EPERM),
    // A filter of the program would also judge the runtime's own calls, which
    // it cannot know.
    no(__NR_seccomp, EINVAL),
];
