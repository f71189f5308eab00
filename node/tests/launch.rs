//! The launcher and the daemon against a runtime that only speaks the control
//! protocol. Needs no privilege, and no network but loopback.
//!
//! Every launcher and daemon is a process of its own, `examples/case.rs`, and
//! the runtime is `examples/fake_runtime.rs`.

mod common;

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use common::{LENT_BYTES, Run, alive, scratch};

#[test]
fn exit_codes_pass_through() {
    let run = Run::new("exit 7").start().wait();
    assert_eq!(run.code, Some(7));
    assert_eq!(run.stderr, "");
}

#[test]
fn death_by_signal_passes_through() {
    let run = Run::new("die 15").start().wait();
    assert_eq!(run.signal, Some(15));
    let run = Run::new("die 9").start().wait();
    assert_eq!(run.signal, Some(9));
}

#[test]
fn a_signal_is_forwarded_and_ends_both() {
    let running = Run::new("sleep 10000").start();
    running.wait_for_slices(1);
    running.signal(libc::SIGTERM);
    let run = running.wait();
    assert_eq!(run.signal, Some(libc::SIGTERM));
}

#[test]
fn a_signal_before_the_start_ends_the_launch() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let run = Run::new("exit 7").pending(signal).start().wait();
        assert_eq!(run.signal, Some(signal as i32), "{}", run.stderr);
        let said = format!("weft: ended by {signal} before the start\n");
        assert_eq!(run.stderr, said);
    }
}

#[test]
fn messages_are_told() {
    let run = Run::new("say 5 bad\u{1b}things exit 124").start().wait();
    assert_eq!(run.code, Some(124));
    assert_eq!(run.stderr, "weft: badthings\n");
    let run = Run::new("relay 1 impossible exit 124").start().wait();
    assert_eq!(run.code, Some(124));
    assert_eq!(run.stderr, "weft: node local 1: impossible\n");
    let run = Run::new("say 4 x exit 123").start().wait();
    assert!(run.stderr.contains("no room"), "{}", run.stderr);
    let run = Run::new("lost 1 exit 122").start().wait();
    assert!(
        run.stderr.contains("node local 1 was lost: 12 pages had their only copy there, and the program was executing there"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_second_image_gets_new_slices() {
    let run = Run::new("exec kick 1 exit 3").start().wait();
    assert_eq!(run.code, Some(3), "{}", run.stderr);
    assert_eq!(run.report["generation"], 1);
    assert_eq!(run.report["nodes"][1]["pulls"], 7);
}

#[test]
fn a_killed_slice_ends_the_program_with_122() {
    let running = Run::new("commands 20000 exit 0").start();
    let slices = running.wait_for_slices(1);
    std::thread::sleep(Duration::from_millis(100));
    common::kill(slices[0], libc::SIGKILL);
    let run = running.wait();
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    assert!(
        run.stderr
            .contains("node local 1 was lost: its slice was killed by SIGKILL"),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("3 pages"), "{}", run.stderr);
}

/// Home sees the end of a link before the launcher sees the end of the slice.
#[test]
fn the_reason_of_a_loss_that_home_saw_first_is_told() {
    let reasons = [
        (libc::SIGKILL, "its slice was killed by SIGKILL; 4 pages"),
        (
            libc::SIGSYS,
            "it made a system call that slices may not make; 4 pages",
        ),
        (libc::SIGUSR1, "it has had enough; 4 pages"),
    ];
    for (signal, reason) in reasons {
        let running = Run::new("watch").start();
        common::kill(running.wait_for_slices(1)[0], signal);
        expect_reason(&running.wait(), reason);
    }
    let hosts = [common::Host::start("reasons", LENT_BYTES)];
    let too_much = (libc::SIGUSR2, "and 64.0 MiB for Weft itself); 4 pages");
    for (signal, reason) in reasons.into_iter().chain([too_much]) {
        let running = Run::new("watch").on(&hosts).start();
        common::kill(running.wait_for_remote_slices(&hosts)[0], signal);
        expect_reason(&running.wait(), reason);
    }
}

fn expect_reason(run: &common::Ran, reason: &str) {
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains(reason), "{}", run.stderr);
}

#[test]
fn a_home_that_does_not_answer_a_loss_is_ended_within_the_lease() {
    let running = Run::new("hang").start();
    let slices = running.wait_for_slices(1);
    let start = Instant::now();
    common::kill(slices[0], libc::SIGKILL);
    let run = running.wait();
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    assert!(run.stderr.contains("did not answer"), "{}", run.stderr);
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
}

/// How long these tests stop something: longer than their lease, and than what is
/// taken for a stop of the launcher.
const STOPPED: Duration = Duration::from_millis(3500);

#[test]
fn a_slice_that_does_not_run_is_lost() {
    let hosts = [common::Host::start("standing", LENT_BYTES)];
    let here = Run::new("commands 20000 exit 0").start();
    let there = Run::new("commands 20000 exit 0").on(&hosts).start();
    common::kill(here.wait_for_slices(1)[0], libc::SIGSTOP);
    common::kill(there.wait_for_remote_slices(&hosts)[0], libc::SIGSTOP);
    for run in [here.wait(), there.wait()] {
        assert_eq!(run.code, Some(122), "{}", run.stderr);
        let said = run.stderr.contains("was lost: its slice did not run for");
        assert!(said, "{}", run.stderr);
    }
}

#[test]
fn a_stop_of_the_program_and_the_launcher_is_no_loss() {
    let hosts = [common::Host::start("stopped", LENT_BYTES)];
    let here = Run::new("stretch commands 4000 exit 5").start();
    let there = Run::new("stretch commands 4000 exit 5").on(&hosts).start();
    here.wait_for_slices(1);
    there.wait_for_remote_slices(&hosts);
    let processes = [here.home(), there.home()];
    for signal in [libc::SIGSTOP, libc::SIGCONT] {
        for running in [&here, &there] {
            running.signal(signal);
        }
        for home in processes {
            common::kill(home, signal);
        }
        if signal == libc::SIGSTOP {
            std::thread::sleep(STOPPED);
        }
    }
    for run in [here.wait(), there.wait()] {
        assert_eq!(run.code, Some(5), "{}", run.stderr);
        assert_eq!(run.stderr, "");
    }
}

#[test]
fn a_program_that_goes_on_alone_takes_the_launcher_with_it() {
    let running = Run::new("sleep 1000 exit 5").start();
    running.wait_for_slices(1);
    let home = running.home();
    common::kill(home, libc::SIGSTOP);
    running.wait_until_stopped();
    common::kill(home, libc::SIGCONT);
    assert_eq!(running.wait().code, Some(5));

    let running = Run::new("sleep 20000").start();
    running.wait_for_slices(1);
    common::kill(running.home(), libc::SIGSTOP);
    running.wait_until_stopped();
    common::kill(running.home(), libc::SIGKILL);
    assert_eq!(running.wait().signal, Some(libc::SIGKILL));

    let running = Run::new("sleep 1000 exit 5").start();
    running.wait_for_slices(1);
    common::kill(running.home(), libc::SIGSTOP);
    running.wait_until_stopped();
    running.signal(libc::SIGCONT);
    assert_eq!(running.wait().code, Some(5));
}

#[test]
fn a_kill_for_want_of_memory_is_told() {
    let group = match common::Group::new(96 << 20) {
        Ok(group) => group,
        Err(why) => {
            let mut stderr = std::io::stderr();
            let line = format!("skipped: a kill for lack of memory: no memory cgroup: {why}");
            return std::io::Write::write_all(&mut stderr, (line + "\n").as_bytes()).unwrap();
        }
    };
    let run = Run::new("hoard exit 0").within(&group.0).start().wait();
    assert_eq!(run.signal, Some(libc::SIGKILL), "{}", run.stderr);
    let said =
        "the program was killed by SIGKILL: the kernel killed a process of its memory cgroup";
    assert!(run.stderr.contains(said), "{}", run.stderr);

    let running = Run::new("watch").within(&group.0).start();
    common::kill(running.wait_for_slices(1)[0], libc::SIGUSR2);
    let run = running.wait();
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    let said = "its slice was killed by SIGKILL: the kernel killed a process";
    assert!(run.stderr.contains(said), "{}", run.stderr);
}

#[test]
fn a_killed_launcher_leaves_nobody() {
    let running = Run::new("hang").nodes(3).start();
    let slices = running.wait_for_slices(2);
    let home = running.home();
    running.signal(libc::SIGKILL);
    drop(running.wait());
    let end = Instant::now() + Duration::from_secs(5);
    while slices.iter().chain([&home]).any(|pid| alive(*pid)) {
        assert!(Instant::now() < end, "orphans");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_running_aggregate_can_be_asked() {
    use weft_node::rundir::{AggregateReply, AggregateRequest, ask, list};
    let running = Run::new("stretch commands 20000 exit 0").start();
    running.wait_for_slices(1);
    running.wait_for_stretch();
    let directory = running.run_directory();
    let views = list(&directory).unwrap().views;
    assert_eq!(views.len(), 1);
    assert_eq!(views[0].nodes.len(), 2);
    let answer = ask(&directory, views[0].pid, &AggregateRequest::Stretch).unwrap();
    assert!(matches!(answer, AggregateReply::Refused(why) if why.contains("already")));
    let answer = ask(
        &directory,
        views[0].pid,
        &AggregateRequest::Shrink { node: 5 },
    )
    .unwrap();
    assert!(matches!(answer, AggregateReply::Refused(why) if why.contains("no node 5")));
    let answer = ask(
        &directory,
        views[0].pid,
        &AggregateRequest::Shrink { node: 0 },
    )
    .unwrap();
    assert!(matches!(answer, AggregateReply::Refused(why) if why.contains("home")));
    let answer = ask(
        &directory,
        views[0].pid,
        &AggregateRequest::Shrink { node: 1 },
    )
    .unwrap();
    assert!(matches!(answer, AggregateReply::Done), "{answer:?}");
    let answer = ask(
        &directory,
        views[0].pid,
        &AggregateRequest::Shrink { node: 1 },
    )
    .unwrap();
    assert!(matches!(answer, AggregateReply::Refused(why) if why.contains("left")));
    running.signal(libc::SIGTERM);
    let run = running.wait();
    assert_eq!(run.signal, Some(libc::SIGTERM));
    assert_eq!(run.stderr, "");
    assert!(list(&directory).unwrap().views.is_empty());
}

#[test]
fn a_node_of_an_unstretched_program_is_given_back_at_once() {
    use weft_node::rundir::{AggregateReply, AggregateRequest, ask, list};
    let running = Run::new("sleep 20000").nodes(3).start();
    let slices = running.wait_for_slices(2);
    let directory = running.run_directory();
    let pid = list(&directory).unwrap().views[0].pid;
    let answer = ask(&directory, pid, &AggregateRequest::Shrink { node: 1 }).unwrap();
    assert!(matches!(answer, AggregateReply::Done), "{answer:?}");
    assert_eq!(running.wait_for_slices(1).len(), 1);
    assert_eq!(slices.iter().filter(|pid| alive(**pid)).count(), 1);
    running.signal(libc::SIGTERM);
    assert_eq!(running.wait().signal, Some(libc::SIGTERM));
}

#[test]
fn a_slice_on_another_host_works_and_its_loss_is_named() {
    let two = common::Host::start("two", LENT_BYTES);
    let one = common::Host::start_knowing("one", LENT_BYTES, &[&two]);
    let hosts = [one, two];
    let run = Run::new("sleep 300 kick 1 sleep 50 exit 5")
        .on(&hosts)
        .start()
        .wait();
    assert_eq!(run.code, Some(5), "{}", run.stderr);
    assert_eq!(run.report["nodes"][2]["pulls"], 7, "{}", run.report);
    let run = Run::new("exec sleep 100 exit 6").on(&hosts).start().wait();
    assert_eq!(run.code, Some(6), "{}", run.stderr);

    let running = Run::new("commands 20000 exit 0").on(&hosts).start();
    let slices = running.wait_for_remote_slices(&hosts);
    common::kill(slices[1], libc::SIGKILL);
    let run = running.wait();
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    assert!(
        run.stderr
            .contains("was lost: its slice was killed by SIGKILL"),
        "{}",
        run.stderr
    );
    let end = Instant::now() + Duration::from_secs(5);
    while alive(slices[0]) {
        assert!(Instant::now() < end, "a slice stayed");
        std::thread::sleep(Duration::from_millis(10));
    }

    let running = Run::new("commands 20000 exit 0").on(&hosts).start();
    let slices = running.wait_for_remote_slices(&hosts);
    hosts[0].kill();
    let run = running.wait();
    assert_eq!(run.code, Some(122), "{}", run.stderr);
    assert!(
        run.stderr.contains(&format!("node {}", hosts[0].address)),
        "{}",
        run.stderr
    );
    assert!(!alive(slices[0]), "the slice outlived its daemon");
}

#[test]
fn refusals_of_hosts_are_named() {
    let host = common::Host::start("small", 70 << 20);
    let hosts = [host];
    let run = Run::new("exit 0")
        .memory(64 << 20)
        .on(&hosts)
        .start()
        .wait();
    assert_eq!(run.code, Some(123), "{}", run.stderr);
    assert!(
        run.stderr.contains("64.0 MiB requested, 4.8 MiB free"),
        "{}",
        run.stderr
    );

    let stranger = scratch("stranger");
    weft_node::config::init(&stranger).unwrap();
    let run = Run::new("exit 0")
        .configuration(&stranger)
        .on(&hosts)
        .start()
        .wait();
    assert_eq!(run.code, Some(125));
    assert!(run.stderr.contains("no key is known"), "{}", run.stderr);

    hosts[0].trust_in(&stranger);
    let run = Run::new("exit 0")
        .configuration(&stranger)
        .on(&hosts)
        .start()
        .wait();
    assert_eq!(run.code, Some(125));
    assert!(
        run.stderr
            .contains("weft node trust --may borrow weft-key-"),
        "{}",
        run.stderr
    );

    let impostor = scratch("impostor");
    weft_node::config::init(&impostor).unwrap();
    common::trust(
        &impostor,
        weft_wire::keys::generate().unwrap().public(),
        &hosts[0].address,
    );
    let run = Run::new("exit 0")
        .configuration(&impostor)
        .on(&hosts)
        .start()
        .wait();
    assert!(
        run.stderr.contains("not the host that it claims to be"),
        "{}",
        run.stderr
    );

    hosts[0].kill();
    let run = Run::new("exit 0").on(&hosts).start().wait();
    assert_eq!(run.code, Some(125));
    assert!(run.stderr.contains("cannot be reached"), "{}", run.stderr);
}

#[test]
fn a_daemon_that_ends_gives_its_aggregates_time() {
    let hosts = [common::Host::start("leaving", LENT_BYTES)];
    let running = Run::new("stretch commands 20000 exit 0").on(&hosts).start();
    running.wait_for_remote_slices(&hosts);
    hosts[0].signal(libc::SIGTERM);
    hosts[0].wait_end(Duration::from_secs(5));
    running.signal(libc::SIGTERM);
    let run = running.wait();
    assert_eq!(run.signal, Some(libc::SIGTERM), "{}", run.stderr);
    assert!(run.stderr.contains("is about to stop"), "{}", run.stderr);
}
