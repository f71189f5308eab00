//! The table as a whole.

use super::*;
use linux_raw_sys::errno::{EINVAL, ENOSYS, EPERM};
use linux_raw_sys::{general, prctl};

fn class(nr: u32, args: &[u64]) -> Class {
    let mut words = [0; 6];
    words[..args.len()].copy_from_slice(args);
    classify(nr.into(), &words)
}

/// Arguments of a plain call; panics for another class.
fn arguments(nr: u32, args: &[u64]) -> [Arg; 6] {
    match class(nr, args) {
        Class::Plain(plain) => plain.args,
        other => panic!("system call {nr} is {other:?}"),
    }
}

#[test]
fn every_number_has_a_class() {
    for nr in (0..600).chain([u64::from(u32::MAX), u64::MAX]) {
        let class = classify(nr, &[0; 6]);
        if nr >= NUMBERS as u64 {
            assert_eq!(class, Class::Home);
        }
        if let Class::Refused(errno) = class {
            assert!(
                (1..134).contains(&errno),
                "system call {nr} is refused with {errno}"
            );
        }
    }
    let known = CALLS.iter().filter(|class| **class != Class::Home).count();
    assert!(known > 270, "only {known} calls are described");
}

#[test]
fn indices_in_descriptions_are_arguments_that_can_be_what_they_are_used_as() {
    for (nr, class) in CALLS.iter().enumerate() {
        let Class::Plain(plain) = class else {
            continue;
        };
        let integer = |index: u8| {
            let arg = plain.args[usize::from(index)];
            assert_eq!(
                arg,
                Arg::Int,
                "system call {nr}: argument {index} is a length"
            );
        };
        for arg in plain.args {
            match arg {
                Arg::In(length) | Arg::Out(length, ..) | Arg::InOut(length, _) => match length {
                    Length::Constant(bytes) => assert!(bytes > 0),
                    Length::Argument(index)
                    | Length::ArgumentPlus(index, _)
                    | Length::Elements(index, _)
                    | Length::Bits(index) => integer(index),
                    Length::Pointed(index) => assert_eq!(
                        plain.args[usize::from(index)],
                        Arg::InOut(Length::Constant(4), When::Success),
                        "system call {nr}"
                    ),
                },
                Arg::InVector(index) | Arg::OutVector(index) | Arg::SignalSet(index) => {
                    integer(index);
                }
                _ => {}
            }
        }
        if let Some(split) = plain.split {
            let data = plain.args[usize::from(split.data)];
            assert!(
                !matches!(data, Arg::Int | Arg::Descriptor),
                "system call {nr}"
            );
            split.length.into_iter().for_each(integer);
            split.position.into_iter().for_each(integer);
        }
    }
}

#[test]
fn requests_commands_and_options_decide() {
    use general::{__NR_fcntl, __NR_ioctl, __NR_prctl};
    let bytes = |arg| matches!(arg, Arg::Out(Length::Constant(36), ..));
    let get = u64::from(linux_raw_sys::ioctl::TCGETS);
    assert!(bytes(arguments(__NR_ioctl, &[0, get])[2]));
    // The kernel looks at the lower half of the request only.
    assert!(bytes(arguments(__NR_ioctl, &[0, get | 1 << 40])[2]));
    assert_eq!(class(__NR_ioctl, &[0, 0xdead_beef]), Class::Home);
    assert_eq!(class(__NR_fcntl, &[0, 9999]), Class::Home);
    assert_eq!(class(__NR_prctl, &[9999]), Class::Home);
    let dispatch = u64::from(prctl::PR_SET_SYSCALL_USER_DISPATCH);
    assert_eq!(
        class(__NR_prctl, &[dispatch]),
        Class::Refused(EINVAL as i32)
    );
    let move_heap = u64::from(prctl::PR_SET_MM);
    assert_eq!(
        class(__NR_prctl, &[move_heap]),
        Class::Refused(EPERM as i32)
    );
    for nr in [__NR_ioctl, __NR_fcntl, __NR_prctl] {
        for which in 0..0x1_0000 {
            if let Class::Plain(plain) = class(nr, &[which, which]) {
                let open = |arg: &Arg| matches!(arg, Arg::Ioctl | Arg::Fcntl | Arg::Prctl);
                assert!(!plain.args.iter().any(open), "system call {nr}, {which:#x}");
            }
        }
    }
}

#[test]
fn only_locking_commands_of_fcntl_wait() {
    let waits = |command| match class(general::__NR_fcntl, &[0, u64::from(command)]) {
        Class::Plain(plain) => plain.may_block(),
        other => panic!("{other:?}"),
    };
    assert!(waits(general::F_SETLKW) && waits(general::F_OFD_SETLKW));
    assert!(!waits(general::F_SETLK) && !waits(general::F_GETFL));
}

#[test]
fn values_that_hide_pointers_go_home() {
    use general::{__NR_getsockopt, __NR_sendto, __NR_setsockopt};
    let attach_filter = 26;
    assert_eq!(class(__NR_setsockopt, &[0, 1, attach_filter]), Class::Home);
    // Counts its length in instructions, not in bytes.
    assert_eq!(class(__NR_getsockopt, &[0, 1, attach_filter]), Class::Home);
    let replace_tables = 64;
    assert_eq!(class(__NR_setsockopt, &[0, 0, replace_tables]), Class::Home);
    assert_eq!(class(__NR_setsockopt, &[0, 99, 1]), Class::Home);
    let reuse_address = 2;
    arguments(__NR_setsockopt, &[0, 1, reuse_address]);
    let zero_copy = 0x400_0000;
    assert_eq!(class(__NR_sendto, &[0, 0, 0, zero_copy]), Class::Home);
    for nr in [
        general::__NR_vmsplice,
        general::__NR_process_vm_readv,
        general::__NR_ptrace,
    ] {
        assert_eq!(class(nr, &[]), Class::Home);
    }
}

#[test]
fn what_cannot_work_is_refused_as_an_older_kernel_would() {
    for nr in [
        general::__NR_io_uring_setup,
        general::__NR_userfaultfd,
        general::__NR_rseq,
    ] {
        assert_eq!(class(nr, &[]), Class::Refused(ENOSYS as i32));
    }
}
