//! Disks of a machine over several nodes: whichever node has one, and whichever way
//! its requests take.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::{Bench, Check, TWO};
use crate::devices::sha256;
use crate::guest::Guest;

pub(super) const CHECKS: [(&str, Check); 2] = [
    ("disks on either node, either way", either_way),
    ("a disk that the host cannot write", full),
];

fn either_way(bench: &Bench<'_>) -> Result<String> {
    for node in ["node=0", "node=1"] {
        for path in ["path=bypass", "path=dsm"] {
            let place = format!("{node},{path}");
            both_vcpus(bench, &place).context(place)?;
        }
    }
    Ok(String::new())
}

/// Bytes of the disk. Each vCPU reads all of it, and writes a half.
const BYTES: usize = 2 << 20;

/// Requests of 4 KiB, one after the other, and long ones, several at once.
const SCRIPT: &str = "echo 0 > /sys/block/vda/queue/read_ahead_kb; \
    for mask in 1 2; do \
        echo 3 > /proc/sys/vm/drop_caches; \
        taskset $mask sha256sum /dev/vda; \
        taskset $mask dd if=/dev/zero of=/dev/vda bs=64k count=8 seek=$((mask * 16 - 16)) 2>/dev/null; \
        sync; \
    done; \
    echo 512 > /sys/block/vda/queue/read_ahead_kb; \
    for mask in 1 2; do \
        echo 3 > /proc/sys/vm/drop_caches; \
        taskset $mask sha256sum /dev/vda; \
    done";

/// What the two vCPUs read is what lies there, and what they write lies there then.
fn both_vcpus(bench: &Bench<'_>, place: &str) -> Result<()> {
    let file = bench.run_directory.with_file_name("disk");
    let model = file.with_extension("model");
    let mut content: Vec<u8> = (0..BYTES as u32)
        .map(|byte| (byte.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    fs::write(&file, &content)?;
    let mut wanted = Vec::new();
    for half in 0..2 {
        fs::write(&model, &content)?;
        wanted.push(sha256(&model)?);
        content[half * BYTES / 2..][..BYTES / 4].fill(0);
    }
    fs::write(&model, &content)?;
    wanted.extend([sha256(&model)?, sha256(&model)?]);
    let disk = format!("{},{place}", file.display());
    let ended = bench.run(TWO, &["--disk", &disk], SCRIPT)?;
    let sums: Vec<&str> = ended
        .lines
        .iter()
        .filter_map(|line| line.text.strip_suffix("  /dev/vda"))
        .collect();
    ensure!(
        sums == wanted,
        "{sums:?} instead of {wanted:?}\n{}",
        ended.tail(20)
    );
    ensure!(fs::read(&file)? == content, "the disk holds something else");
    Ok(())
}

/// Length of a disk; the host may write only its first part: a limit of the
/// process (RLIMIT_FSIZE), above the memory of its nodes, is like a full file system
/// that needs no root.
const LARGE: u64 = 512 << 20;
/// The limit, in the shell's blocks of 512 bytes: 320 MiB.
const LIMIT_BLOCKS: u64 = 640 << 10;

/// Writes that fail on the host: the guest's program hears of it, and so does the host's
/// user, once, with the image and the reason, wherever the disk and the vCPU are.
fn full(bench: &Bench<'_>) -> Result<String> {
    for node in ["node=0", "node=1"] {
        let file = bench.run_directory.with_file_name("large");
        fs::File::create(&file)?.set_len(LARGE)?;
        let disk = format!("{},{node}", file.display());
        let script = "for mask in 1 2; do \
            taskset $mask dd if=/dev/zero of=/dev/vda bs=64k count=4 seek=6400 conv=fsync; \
            echo dd ended with $?; \
        done";
        let options = [TWO.options, &["--disk", &disk]].concat();
        let machine = bench.machine(&options, script, "")?;
        let mut limited = Command::new("sh");
        let line = format!("trap '' XFSZ; ulimit -f {LIMIT_BLOCKS}; exec \"$0\" \"$@\"");
        limited.args(["-c", &line]).arg(machine.get_program());
        limited.args(machine.get_args());
        for (name, value) in machine.get_envs() {
            limited.env(name, value.unwrap_or_default());
        }
        let ended = bench.finish(Guest::start(&mut limited)?)?;
        let failed = ended.console().matches("dd ended with 1").count();
        ensure!(failed == 2, "the guest saw {failed}\n{}", ended.tail(20));
        let said = format!("disk {}: cannot write", file.display());
        let lines: Vec<&str> = ended.stderr.lines().filter(|l| l.contains(&said)).collect();
        ensure!(
            matches!(lines[..], [line] if line.contains("File too large (os error 27)")),
            "{node}: {}",
            ended.stderr
        );
    }
    Ok(String::new())
}
