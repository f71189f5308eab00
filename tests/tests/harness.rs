//! The harness judged: a stand-in for `weft` is wrong in one way at a time, and
//! each must be reported as a failure, for the right reason.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Builds the few programs that are needed, once.
fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
        let mut make = Command::new("make");
        make.arg("-s")
            .arg("-C")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs"))
            .arg(format!("OUT={}", directory.display()));
        for name in ["text", "coherence", "ends", "mappings"] {
            make.arg(directory.join(name));
        }
        let output = make.output().expect("make is installed");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        directory
    })
}

fn run(mode: &str, arguments: &[&str]) -> (Output, String) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    // A run that failed keeps what it wrote.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = format!("run-{}-{number}", std::process::id());
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR")).join(temporary);
    std::fs::create_dir_all(&temporary).expect("the target directory can be written to");
    let output = Command::new(env!("CARGO_BIN_EXE_weft-e2e"))
        .arg("--weft")
        .arg(tests.join("tests/fake-weft.sh"))
        .arg("--programs")
        .arg(programs())
        .arg("--sources")
        .arg(tests.join("programs"))
        .args(["--rounds", "1", "--nodes", "3"])
        .args(arguments)
        .env("FAKE_WEFT", mode)
        .env("TMPDIR", &temporary)
        .output()
        .expect("the harness was built");
    let kept = format!("{}/weft-e2e-", temporary.display());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.contains(&kept), !output.status.success(), "{said}");
    std::fs::remove_dir_all(&temporary).expect("nothing runs in it any more");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or("")
}

fn must_fail(mode: &str, arguments: &[&str], reason: &str) {
    let (output, text) = run(mode, arguments);
    assert_eq!(output.status.code(), Some(1), "{mode}: {text}");
    assert_eq!(last_line(&text), "0 passed, 1 failed, 0 skipped", "{text}");
    assert!(text.contains(reason), "{mode} without `{reason}`: {text}");
}

#[test]
fn what_is_right_passes() {
    for jump in ["never", "8", "auto"] {
        let (output, text) = run("right", &["--jump", jump, "coherence"]);
        assert!(output.status.success(), "{text}");
        assert_eq!(last_line(&text), "1 passed, 0 failed, 0 skipped");
    }
    let (output, text) = run("right", &["mappings"]);
    assert!(output.status.success(), "{text}");
}

#[test]
fn wrong_bytes_are_reported() {
    must_fail("wrong-byte", &["coherence"], "first differ at byte");
    must_fail("short", &["coherence"], "this one ends at byte 4");
    must_fail(
        "wrong-output",
        &["mappings"],
        "file: first differ at byte 12345",
    );
}

#[test]
fn wrong_ends_are_reported() {
    must_fail(
        "wrong-exit",
        &["ends-exit-0"],
        "native: exit 0, here: exit 43",
    );
    must_fail(
        "signal",
        &["ends-exit-0"],
        "native: exit 0, here: signal 15",
    );
    must_fail(
        "wrong-exit",
        &["ends-abort-0"],
        "native: signal 6, here: exit 43",
    );
}

#[test]
fn a_hang_is_killed_and_shown() {
    let started = Instant::now();
    must_fail("hang", &["--bound", "2", "ends-exit-0"], "sleep 600");
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn counters_are_demanded() {
    must_fail("too-many-pages", &["coherence"], "with a budget of");
    must_fail(
        "few-pushes",
        &["--jump", "never", "coherence"],
        "3 pushes, at least 1000 expected",
    );
    must_fail(
        "jumps-anyway",
        &["--jump", "never", "coherence"],
        "though jumping was forbidden",
    );
    must_fail("no-stats", &["coherence"], "no statistics");
}

#[test]
fn a_process_left_behind_is_reported() {
    must_fail("orphan", &["ends-exit-0"], "left a process behind");
}

#[test]
fn what_cannot_run_is_skipped_with_its_reason() {
    let (output, text) = run("right", &["exceptions", "coherence"]);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("program `exceptions` was not built"),
        "{text}"
    );
    assert_eq!(last_line(&text), "1 passed, 0 failed, 1 skipped");
}
