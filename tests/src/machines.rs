//! Linux guests under `weft vm run`: boots, what they say of themselves, their
//! own self-checks, and what is left of a disk after its machine was killed.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::boot::{Boot, CLOUD, Disk, Images, Monitor, SMALL};
use crate::context::{Context, kvm_missing, kvm_nodes_missing};
use crate::devices::run_devices;
use crate::guest::Ended;
use crate::report::{Report, Verdict};

/// Kernel messages of level warning and worse.
pub const WARNINGS: &str =
    "dmesg -r | grep '^<[0-4]>' | sed 's/^/weft-warning: /'; nproc | sed 's/^/cpus: /'";

/// The kernel says so where a timer's interrupt did not end for milliseconds: the
/// host had other work for the vCPU's processor. Hardware says it after an SMI.
const TAKEN_AWAY: &str = "hrtimer: interrupt took";

/// When a deterministic machine starts, by its own clock: the start of 2026.
const FIRST_SECOND: u64 = 1_767_225_600;

/// What a guest boots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Image {
    /// The small kernel and busybox.
    Small,
    /// Debian's cloud kernel, unmodified, and busybox.
    Cloud,
    /// The small kernel with Debian on a disk.
    Disk,
}

impl Image {
    /// Its files, by their names in the folder of images.
    fn files(self) -> &'static [&'static str] {
        match self {
            Image::Small => &SMALL,
            Image::Cloud => &CLOUD,
            Image::Disk => &["vmlinux", "busybox.cpio", "debian/root.ext4"],
        }
    }
}

/// One boot and what must come of it.
struct Case {
    name: String,
    image: Image,
    monitor: Monitor,
    cpus: usize,
    /// On this many nodes of this host.
    nodes: usize,
    memory_mib: u64,
    script: &'static str,
    /// Each must be on the console.
    says: &'static [&'static str],
    bound_s: u64,
    /// Only in the long run.
    long: bool,
}

impl Case {
    fn boot(image: Image, monitor: Monitor, cpus: usize) -> Case {
        let (what, memory_mib) = match image {
            Image::Small => ("small kernel", 128),
            Image::Cloud => ("Debian's cloud kernel", 512),
            Image::Disk => ("Debian on a disk", 512),
        };
        let back_end = if monitor == Monitor::Kvm {
            "kvm"
        } else {
            "soft"
        };
        Case {
            name: format!("{what}, {cpus} vCPUs, {back_end}"),
            image,
            monitor,
            cpus,
            nodes: 1,
            memory_mib,
            script: WARNINGS,
            says: &[],
            // A KVM without hardware virtualisation takes up to a minute on a busy host.
            bound_s: if monitor == Monitor::Kvm { 120 } else { 60 },
            long: false,
        }
    }

    fn check(
        name: &str,
        image: Image,
        script: &'static str,
        says: &'static [&'static str],
    ) -> Case {
        Case {
            name: name.to_string(),
            script,
            says,
            bound_s: 300,
            ..Case::boot(image, Monitor::Soft, 2)
        }
    }

    /// The same on two nodes.
    fn on_two_nodes(self) -> Case {
        Case {
            name: format!("{} on 2 nodes", self.name),
            nodes: 2,
            memory_mib: self.memory_mib.max(256),
            bound_s: 2 * self.bound_s,
            ..self
        }
    }

    fn long(mut self) -> Case {
        self.long = true;
        self
    }
}

/// What the Debian image's `self-check` says; docs/guest.md says what each does.
static SELF_CHECKS: [&str; 13] = [
    "self-check digests ok",
    "self-check cipher ok",
    "self-check signatures ok",
    "self-check compressors ok",
    "self-check compile ok",
    "self-check database ok",
    "self-check python ok",
    "self-check stress-cpu ok",
    "self-check stress-vm ok",
    "self-check stress-futex ok",
    "self-check stress-pipe ok",
    "self-check stress-mutex ok",
    "self-check litmus ok",
];

/// The same, with a part of Python's tests, a second of each kind of stress, and without the
/// litmus tests, which other cases run.
const QUICK_CHECK: &str = "self-check digests cipher signatures compressors compile database; \
    python3 -m test -q test_int test_float test_struct test_zlib test_hashlib test_complex \
    test_array test_threading_local >/dev/null && echo self-check python ok; \
    for class in cpu vm futex pipe mutex; do \
    [ $class = vm ] && more='--vm-bytes 32M' || more=; \
    stress-ng --verify --$class 2 $more -t 1 >/tmp/log 2>&1 && echo self-check stress-$class ok \
    || cat /tmp/log; done";

fn cases() -> Vec<Case> {
    use Image::{Cloud, Disk, Small};
    use Monitor::{Kvm, Soft};
    let mut cases = Vec::new();
    for cpus in [1, 2, 4] {
        cases.push(Case::boot(Small, Soft, cpus));
        cases.push(Case::boot(Cloud, Soft, cpus));
    }
    // On KVM `aggregate` boots one in every run, of two nodes.
    cases.push(Case::boot(Small, Kvm, 1).long());
    cases.push(Case::boot(Small, Kvm, 2).long());
    cases.push(Case::boot(Small, Kvm, 2).on_two_nodes().long());
    cases.push(Case::boot(Cloud, Soft, 2).on_two_nodes());
    // A round takes seconds where KVM emulates the guest's kernel.
    cases.push(Case {
        name: "page tables written on the other node, 2 vCPUs, kvm".to_string(),
        script: "tables 2000 10000 && echo tables: well",
        says: &["tables: well"],
        bound_s: 10_900,
        ..Case::boot(Small, Kvm, 2).on_two_nodes().long()
    });
    let litmus = |name, script| Case::check(name, Small, script, &["litmus: well"]);
    cases.push(litmus(
        "x86-TSO litmus tests, 3000 rounds, 2 vCPUs, soft",
        "litmus -r 3000 && echo litmus: well",
    ));
    cases.push(
        litmus(
            "x86-TSO litmus tests, 2 vCPUs, soft",
            "litmus && echo litmus: well",
        )
        .long(),
    );
    cases.push(Case::check(
        "page tables written on the other vCPU, 2 vCPUs, soft",
        Small,
        "tables 300 && tables -c 1,0 100 && echo tables: well",
        &["tables: well"],
    ));
    cases.push(Case::check(
        "kernels and shared words, 2 vCPUs, soft",
        Small,
        "npb -t 2 all Q && npb -p 2 all Q && sharing -n 100000 all && \
         sharing -l -n 100000 all && sharing bounce && echo npb: well",
        &["npb: well"],
    ));
    let itself = || {
        let name = "Debian checks itself, 2 vCPUs, soft";
        Case::check(name, Disk, "self-check", &SELF_CHECKS)
    };
    cases.push(itself().long());
    cases.push(itself().on_two_nodes().long());
    let name = "Debian checks itself quickly, 2 vCPUs, soft";
    let quick = Case::check(name, Disk, QUICK_CHECK, &SELF_CHECKS[..12]);
    cases.push(quick.on_two_nodes().long());
    cases
}

/// How the suite is run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What `make guest` and `make guest-debian` left.
    pub images: Images,
    /// Rounds of every boot.
    pub rounds: usize,
    /// The long cases as well.
    pub long: bool,
    /// Only cases whose name contains one of these; all when empty.
    pub names: Vec<String>,
}

impl Plan {
    fn wants(&self, name: &str, long: bool) -> bool {
        match self.names.as_slice() {
            [] => self.long || !long,
            names => names.iter().any(|part| name.contains(part.as_str())),
        }
    }
}

/// Boots every case.
pub fn run_machines(context: &Context, plan: &Plan, report: &Report) {
    let kvm_missing = kvm_missing();
    for case in cases() {
        if !plan.wants(&case.name, case.long) {
            continue;
        }
        let missing = match case.monitor {
            Monitor::Kvm if case.nodes > 1 => kvm_nodes_missing(),
            Monitor::Kvm => kvm_missing.clone(),
            _ => None,
        };
        if let Some(why) = missing.or_else(|| plan.images.missing(case.image.files())) {
            report.add(&case.name, Duration::ZERO, Verdict::Skipped(why));
            continue;
        }
        for _ in 0..plan.rounds.max(1) {
            let started = Instant::now();
            let verdict = run_case(context, plan, &case)
                .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
            report.add(&case.name, started.elapsed(), verdict);
        }
    }
    type Check = fn(&Context, &Images) -> Result<Verdict>;
    let others: [(&str, Image, Check); 5] = [
        ("a disk after its machine was killed", Image::Small, killed),
        (
            "debug registers and single steps",
            Image::Small,
            watchpoints,
        ),
        (
            "what the kernel protects itself with",
            Image::Cloud,
            protections,
        ),
        (
            "two deterministic runs are one",
            Image::Small,
            deterministic,
        ),
        ("Debian finds the CPU that --cpu says", Image::Disk, models),
    ];
    for (name, image, check) in others {
        if !plan.wants(name, false) {
            continue;
        }
        if let Some(why) = plan.images.missing(image.files()) {
            report.add(name, Duration::ZERO, Verdict::Skipped(why));
            continue;
        }
        let started = Instant::now();
        let verdict = check(context, &plan.images)
            .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
        report.add(name, started.elapsed(), verdict);
    }
    let wanted = |name: &str| plan.wants(name, false);
    run_devices(context, &plan.images, &wanted, report);
}

fn boot_of(context: &Context, images: &Images, image: Image) -> Result<Boot> {
    Ok(match image {
        Image::Small => images.small(&context.weft)?,
        Image::Cloud => images.cloud(&context.weft)?,
        Image::Disk => {
            let mut boot = images.small(&context.weft)?;
            let copy = context.directory("root-image")?.join("root.ext4");
            copy_sparse(&images.file("debian/root.ext4")?, &copy)?;
            boot.disks.push(Disk::new(&copy));
            boot.words = "root=/dev/vda rw".to_string();
            boot
        }
    })
}

/// The image stays as it was built: a guest gets a copy.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<()> {
    let status = std::process::Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        .args([from, to])
        .status()?;
    ensure!(status.success(), "copying {}: {status}", from.display());
    Ok(())
}

fn run_case(context: &Context, plan: &Plan, case: &Case) -> Result<Verdict> {
    let mut boot = boot_of(context, &plan.images, case.image)?;
    boot.cpus = case.cpus;
    boot.memory_mib = case.memory_mib;
    if case.nodes > 1 {
        boot.options = vec!["--nodes".to_string(), case.nodes.to_string()];
    }
    boot.script = case.script.to_string();
    boot.bound = Duration::from_secs(case.bound_s);
    let run = boot.run(case.monitor)?;
    for disk in &boot.disks {
        fs::remove_file(&disk.file).context("removing the copied image")?;
    }
    let mut reasons = Vec::new();
    let missing = case
        .says
        .iter()
        .filter(|text| run.ended.line(text).is_none())
        .map(|text| format!("the guest does not say `{text}`"));
    reasons.extend(missing);
    if case.script == WARNINGS {
        reasons.extend(check_boot(&run.ended, case.cpus));
    } else if run.ended.line("weft-guest: exit 0").is_none() {
        reasons.push("the guest's command failed".to_string());
    }
    if reasons.is_empty() {
        let at = run.user_space_s().unwrap_or_default();
        return Ok(Verdict::Passed(format!("user space after {at:.2} s")));
    }
    reasons.push(run.ended.tail(20));
    Ok(Verdict::Failed(reasons))
}

/// What is wrong with a boot that ran [`WARNINGS`] on this many CPUs.
pub fn check_boot(ended: &Ended, cpus: usize) -> Vec<String> {
    let mut reasons: Vec<String> = ended
        .lines
        .iter()
        .filter(|line| line.text.starts_with("weft-warning: "))
        .filter(|line| !line.text.contains(TAKEN_AWAY))
        .map(|line| format!("the kernel warns: {}", line.text))
        .collect();
    if ended.line(&format!("cpus: {cpus}")).is_none() {
        reasons.push(format!("the guest does not see {cpus} CPUs"));
    }
    reasons
}

/// What a guest was told is written is in the disk's file after `kill -9`. The
/// host's page cache outlives the process, so this does not judge flushes.
fn killed(context: &Context, images: &Images) -> Result<Verdict> {
    let directory = context.directory("killed")?;
    let disk = directory.join("disk.img");
    fs::File::create(&disk)?.set_len(32 << 20)?;
    let mut boot = images.small(&context.weft)?.running(
        "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); printf '%-512s' record-$i | dd of=/dev/vda bs=512 seek=$i count=1 conv=notrunc,fsync 2>/dev/null && echo written $i; done",
    );
    boot.disks.push(Disk::new(&disk));
    let mut guest = boot.start(Monitor::Soft)?;
    let seen = guest.wait_for("written 40", Duration::from_secs(60));
    ensure!(seen.is_some(), "the guest writes nothing");
    guest.kill()?;
    let ended = guest.finish(Duration::from_secs(5))?;
    let written = ended
        .lines
        .iter()
        .filter_map(|line| line.text.strip_prefix("written ")?.parse::<usize>().ok())
        .max()
        .context("the guest wrote nothing")?;
    let bytes = fs::read(&disk)?;
    let lost: Vec<usize> = (1..=written)
        .filter(|i| {
            let sector = &bytes[i * 512..(i + 1) * 512];
            !sector.starts_with(format!("record-{i} ").as_bytes())
        })
        .collect();
    if lost.is_empty() {
        return Ok(Verdict::Passed(format!("all of {written} records")));
    }
    Ok(Verdict::Failed(vec![format!(
        "{} of {written} records are lost, the first {}",
        lost.len(),
        lost[0]
    )]))
}

/// What a debugger in a guest does with debug registers: `watchpoints.c`, which
/// passes on hardware.
fn watchpoints(context: &Context, images: &Images) -> Result<Verdict> {
    let directory = context.directory("watchpoints")?;
    let program = context.programs.join("watchpoints");
    let mut boot = (images.small(&context.weft)?).with_program(&program, &directory)?;
    boot.script = "/watchpoints".to_string();
    boot.cpus = 2;
    let ended = boot.run(Monitor::Soft)?.ended;
    if ended.line("watchpoints: well").is_some() {
        return Ok(Verdict::Passed(format!(
            "{:.1} s",
            ended.took.as_secs_f64()
        )));
    }
    Ok(Verdict::Failed(vec![ended.tail(12)]))
}

/// The levels of x86-64 that the guest's C library finds are those of the model, on
/// one node and on two.
fn models(context: &Context, images: &Images) -> Result<Verdict> {
    const LEVELS: [&str; 3] = ["x86-64-v2", "x86-64-v3", "x86-64-v4"];
    let cases: [(&[&str], usize); 6] = [
        (&["--cpu", "v1"], 0),
        (&[], 1),
        (&["--cpu", "v2", "--deterministic"], 1),
        (&["--nodes", "2"], 1),
        (&["--cpu", "v3", "--deterministic"], 2),
        (&["--cpu", "v3", "--nodes", "2"], 2),
    ];
    for (options, supported) in cases {
        let mut boot = boot_of(context, images, Image::Disk)?;
        boot.options
            .extend(options.iter().map(|word| word.to_string()));
        boot.cpus = 2;
        boot.memory_mib = 256;
        boot.script = "/lib64/ld-linux-x86-64.so.2 --help".to_string();
        boot.bound = Duration::from_secs(120);
        let run = boot.run(Monitor::Soft)?;
        for (index, level) in LEVELS.iter().enumerate() {
            let line = run.ended.line(level);
            let line = line.with_context(|| format!("{options:?}: nothing of {level}"))?;
            ensure!(
                line.text.contains("supported") == (index < supported),
                "{options:?}: {}",
                line.text
            );
        }
    }
    Ok(Verdict::Passed(String::new()))
}

/// Debian's kernel finds what CPUID offers it and uses it: `protections.c`.
fn protections(context: &Context, images: &Images) -> Result<Verdict> {
    const WANTED: [&str; 4] = ["smep", "smap", "umip", "fsgsbase"];
    let directory = context.directory("protections")?;
    let program = context.programs.join("protections");
    let mut boot = (images.cloud(&context.weft)?).with_program(&program, &directory)?;
    boot.script = "grep -m 1 ^flags /proc/cpuinfo; /protections".to_string();
    let ended = boot.run(Monitor::Soft)?.ended;
    let line = ended
        .lines
        .iter()
        .find(|line| line.text.starts_with("flags"));
    let flags: Vec<&str> = (line.context("the guest says nothing of its CPU")?)
        .text
        .split_whitespace()
        .collect();
    let missing = WANTED.iter().filter(|name| !flags.contains(name));
    let mut reasons: Vec<String> = missing.map(|name| format!("no {name}")).collect();
    if ended.line("protections: well").is_some() && reasons.is_empty() {
        return Ok(Verdict::Passed(WANTED.join(", ")));
    }
    reasons.push(ended.tail(12));
    Ok(Verdict::Failed(reasons))
}

/// With the clock driven by the instruction count a run repeats exactly: the clock
/// on the wall as well as the time since the start, and what both seed.
fn deterministic(context: &Context, images: &Images) -> Result<Verdict> {
    let mut notes = Vec::new();
    for cpus in [1, 3] {
        let mut boot = images.small(&context.weft)?.running(
            "cat /proc/uptime; touch /tmp/now; echo wall $(date +%s) $(stat -c %y /tmp/now); \
             head -c 16 /dev/urandom | md5sum; dmesg",
        );
        boot.cpus = cpus;
        boot.options.push("--deterministic".to_string());
        let consoles = [boot.run(Monitor::Soft)?, boot.run(Monitor::Soft)?];
        let [first, second] = consoles.map(|run| run.ended.console());
        let wall = first.lines().find_map(|line| line.strip_prefix("wall "));
        let wall = wall.context("the guest does not say what time it is")?;
        let seconds: u64 = wall.split(' ').next().unwrap_or_default().parse()?;
        ensure!(
            (FIRST_SECOND..FIRST_SECOND + 60).contains(&seconds),
            "the guest's clock shows {wall}"
        );
        if first != second {
            let differing = first.lines().zip(second.lines()).find(|(a, b)| a != b);
            let reason = format!("{cpus} vCPUs: the consoles differ: {differing:?}");
            return Ok(Verdict::Failed(vec![reason]));
        }
        notes.push(format!("{cpus} vCPUs: {} bytes of console", first.len()));
    }
    Ok(Verdict::Passed(notes.join(", ")))
}
