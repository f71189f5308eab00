//! One boot of a Linux guest, under `weft vm run` or under QEMU's TCG.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::executable;
use crate::guest::{Ended, Guest};
use anyhow::{Context as _, Result, ensure};

/// What the guest's first program prints first.
pub const USER_SPACE: &str = "weft-guest: hello";

/// QEMU's quickest machine for this: q35 without what nobody uses here.
const TCG_MACHINE: &str = "q35,smm=off,vmport=off,sata=off";

/// The files of the small kernel with the busybox image.
pub const SMALL: [&str; 2] = ["vmlinux", "busybox.cpio"];

/// The files of the kernel for several nodes, with the same image.
pub const AGGREGATE: [&str; 2] = ["aggregate/vmlinux", "busybox.cpio"];

/// The files of Debian's cloud kernel, with busybox and its modules.
pub const CLOUD: [&str; 2] = ["debian/vmlinuz", "debian/initrd.cpio.gz"];

/// The monitor that runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Monitor {
    /// `weft vm run` on the software vCPU.
    Soft,
    /// `weft vm run` on KVM.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
}

impl Monitor {
    /// As a table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Monitor::Soft => "weft, soft",
            Monitor::Kvm => "weft, kvm",
            Monitor::Tcg => "QEMU TCG",
        }
    }
}

/// The first file whose last name is `name` in a cpio archive of the kind
/// "newc" (the kernel's Documentation/driver-api/early-userspace).
fn cpio_file<'a>(archive: &'a [u8], name: &str) -> Option<&'a [u8]> {
    const HEADER: usize = 110;
    let padded = |length: usize| length.next_multiple_of(4);
    let mut rest = archive;
    loop {
        let header = rest.get(..HEADER)?;
        let field = |index: usize| {
            let digits = std::str::from_utf8(&header[6 + 8 * index..][..8]).ok()?;
            usize::from_str_radix(digits, 16).ok()
        };
        let (size, name_size) = (field(6)?, field(11)?);
        let path = rest.get(HEADER..(HEADER + name_size).checked_sub(1)?)?;
        let data = rest.get(padded(HEADER + name_size)..)?;
        if size > 0 && path.rsplit(|byte| *byte == b'/').next() == Some(name.as_bytes()) {
            return data.get(..size);
        }
        rest = data.get(padded(size)..)?;
    }
}

/// A member of such an archive, and the end of the archive: a program that is
/// unpacked as `/NAME`.
fn cpio_program(name: &str, bytes: &[u8]) -> Vec<u8> {
    const REGULAR_EXECUTABLE: usize = 0o100_755;
    let mut archive = Vec::new();
    for (path, mode, data) in [
        (name, REGULAR_EXECUTABLE, bytes),
        ("TRAILER!!!", 0, &[][..]),
    ] {
        // Inode, mode, owners, links, time, size, devices, length of the name, sum.
        let fields = [
            1,
            mode,
            0,
            0,
            1,
            0,
            data.len(),
            0,
            0,
            0,
            0,
            path.len() + 1,
            0,
        ];
        archive.extend(b"070701");
        archive.extend(
            fields
                .iter()
                .flat_map(|field| format!("{field:08X}").into_bytes()),
        );
        archive.extend(path.bytes().chain([0]));
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(data);
        archive.resize(archive.len().next_multiple_of(4), 0);
    }
    archive
}

/// Where `make guest` and `make guest-debian` leave what they build.
#[derive(Debug, Clone)]
pub struct Images {
    pub folder: PathBuf,
}

impl Images {
    /// An image by its name in the folder.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        let file = self.folder.join(name);
        ensure!(
            file.exists(),
            "{} is missing: `make guest guest-debian`",
            file.display()
        );
        Ok(file)
    }

    /// Which of these images is not there, if any, as a reason to skip what needs it.
    pub fn missing(&self, names: &[&str]) -> Option<String> {
        let name = names.iter().find(|name| self.file(name).is_err())?;
        Some(format!("no image {name}: `make guest guest-debian`"))
    }

    /// A static program of the busybox image, copied to `to`: the very one that
    /// guests run.
    pub fn program(&self, name: &str, to: &Path) -> Result<()> {
        let archive = fs::read(self.file("busybox.cpio")?)?;
        let bytes = cpio_file(&archive, name)
            .with_context(|| format!("busybox.cpio holds no program {name}"))?;
        executable::write(to, bytes)
    }

    /// The small kernel with the busybox image.
    pub fn small(&self, weft: &Path) -> Result<Boot> {
        let [kernel, initrd] = SMALL;
        Ok(Boot::new(weft, &self.file(kernel)?, &self.file(initrd)?))
    }

    /// The kernel for several nodes, with the busybox image.
    pub fn aggregate(&self, weft: &Path) -> Result<Boot> {
        let [kernel, initrd] = AGGREGATE;
        Ok(Boot::new(weft, &self.file(kernel)?, &self.file(initrd)?))
    }

    /// Debian's cloud kernel with busybox; it needs more memory.
    pub fn cloud(&self, weft: &Path) -> Result<Boot> {
        let [kernel, initrd] = CLOUD;
        Ok(Boot {
            memory_mib: 512,
            ..Boot::new(weft, &self.file(kernel)?, &self.file(initrd)?)
        })
    }
}

/// A raw image for a guest.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The image.
    pub file: PathBuf,
    /// The guest may not write.
    pub read_only: bool,
    /// Past the host's page cache.
    pub direct: bool,
}

impl Disk {
    /// A disk that the guest may write to, through the host's page cache.
    pub fn new(file: &Path) -> Disk {
        Disk {
            file: file.to_path_buf(),
            read_only: false,
            direct: false,
        }
    }

    /// The same, read-only.
    pub fn read_only(mut self) -> Disk {
        self.read_only = true;
        self
    }

    /// The same, past the page cache.
    pub fn direct(mut self) -> Disk {
        self.direct = true;
        self
    }
}

/// A network for a guest.
#[derive(Debug, Clone)]
pub enum Net {
    /// In user space; the gateway is the host's loopback.
    User {
        /// Host and guest port of each way in.
        forwards: Vec<(u16, u16)>,
    },
    /// The name of a tap device.
    Tap(String),
}

/// A guest.
#[derive(Debug, Clone)]
pub struct Boot {
    /// Words before the monitor's command: another network namespace, say.
    pub prefix: Vec<OsString>,
    /// The `weft` command.
    pub weft: PathBuf,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: PathBuf,
    pub disks: Vec<Disk>,
    /// Network cards.
    pub nets: Vec<Net>,
    /// vCPUs.
    pub cpus: usize,
    pub memory_mib: u64,
    /// More options of `weft vm run`.
    pub options: Vec<String>,
    /// More words of the kernel's command line.
    pub words: String,
    /// What the guest's shell runs; it only prints and ends when empty.
    pub script: String,
    /// It failed when it takes longer.
    pub bound: Duration,
}

impl Boot {
    /// One vCPU, 256 MiB, two minutes.
    pub fn new(weft: &Path, kernel: &Path, initrd: &Path) -> Boot {
        Boot {
            prefix: Vec::new(),
            weft: weft.to_path_buf(),
            kernel: kernel.to_path_buf(),
            initrd: initrd.to_path_buf(),
            disks: Vec::new(),
            nets: Vec::new(),
            cpus: 1,
            memory_mib: 256,
            options: Vec::new(),
            words: String::new(),
            script: String::new(),
            bound: Duration::from_secs(120),
        }
    }

    /// The same, running `script`.
    pub fn running(&self, script: &str) -> Boot {
        Boot {
            script: script.to_string(),
            ..self.clone()
        }
    }

    /// The same with one program more, `/NAME` in the initial RAM disk, which is
    /// made anew in `directory`.
    pub fn with_program(mut self, program: &Path, directory: &Path) -> Result<Boot> {
        let name = program.file_name().and_then(|name| name.to_str());
        let name = name.context("a program has a name")?;
        let bytes = fs::read(program)
            .with_context(|| format!("{} is missing: `make programs`", program.display()))?;
        let mut archive = fs::read(&self.initrd)?;
        // Where an archive that is not compressed may begin.
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(cpio_program(name, &bytes));
        self.initrd = directory.join("with-program.cpio");
        fs::write(&self.initrd, archive)?;
        Ok(self)
    }

    fn command_line(&self) -> String {
        let mut line = format!("console=ttyS0 quiet {}", self.words);
        if !self.script.is_empty() {
            line += &format!(" weft.run=\"{}\"", self.script.replace('"', "%22"));
        }
        line
    }

    /// The command that boots it under `monitor`.
    pub fn command(&self, monitor: Monitor) -> Command {
        match monitor {
            Monitor::Soft => self.weft_command("soft"),
            Monitor::Kvm => self.weft_command("kvm"),
            Monitor::Tcg => self.qemu_command(),
        }
    }

    /// A program, after the arguments that precede it.
    fn program(&self, program: &Path) -> Command {
        let Some((first, rest)) = self.prefix.split_first() else {
            return Command::new(program);
        };
        let mut command = Command::new(first);
        command.args(rest).arg(program);
        command
    }

    fn weft_command(&self, backend: &str) -> Command {
        let mut command = self.program(&self.weft);
        command.args(["vm", "run", "--no-reboot", "--backend", backend]);
        command.arg("--kernel").arg(&self.kernel);
        command.arg("--initrd").arg(&self.initrd);
        for disk in &self.disks {
            let mut argument = disk.file.clone().into_os_string();
            for (wanted, option) in [(disk.read_only, ",ro"), (disk.direct, ",direct")] {
                if wanted {
                    argument.push(option);
                }
            }
            command.arg("--disk").arg(argument);
        }
        for net in &self.nets {
            command.args(["--net", &weft_net(net)]);
        }
        command.args(["--cpus", &self.cpus.to_string()]);
        command.args(["--memory", &format!("{}M", self.memory_mib)]);
        command.args(["--cmdline", &self.command_line()]);
        command.args(&self.options);
        command
    }

    fn qemu_command(&self) -> Command {
        let mut command = self.program(Path::new("qemu-system-x86_64"));
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-M",
            TCG_MACHINE,
            "-nodefaults",
            "-no-user-config",
        ]);
        command.args(["-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel);
        command.arg("-initrd").arg(&self.initrd);
        for (index, disk) in self.disks.iter().enumerate() {
            let mut drive = format!(
                "file={},format=raw,if=none,id=disk{index}",
                disk.file.display()
            );
            if disk.read_only {
                drive += ",readonly=on";
            }
            if disk.direct {
                drive += ",cache=none,aio=io_uring";
            }
            command.args(["-drive", &drive]);
            command.args(["-device", &format!("virtio-blk-pci,drive=disk{index}")]);
        }
        for (index, net) in self.nets.iter().enumerate() {
            let back_end = qemu_net(net, index);
            command.args(["-netdev", &back_end]);
            command.args(["-device", &format!("virtio-net-pci,netdev=net{index}")]);
        }
        command.args(["-smp", &self.cpus.to_string()]);
        command.args(["-m", &self.memory_mib.to_string()]);
        command.args(["-append", &self.command_line()]);
        command
    }

    /// Boots it.
    pub fn start(&self, monitor: Monitor) -> Result<Guest> {
        Guest::start(&mut self.command(monitor))
    }

    /// Boots it and waits for its end.
    pub fn run(&self, monitor: Monitor) -> Result<Run> {
        let ended = self.start(monitor)?.finish(self.bound)?;
        ensure!(
            ended.ended_well() && ended.line(USER_SPACE).is_some(),
            "{}: {} after {:.1} s: {}\n{}",
            monitor.name(),
            ended
                .status
                .map_or("no end".to_string(), |status| status.to_string()),
            ended.took.as_secs_f64(),
            ended.stderr.trim(),
            ended.tail(12),
        );
        Ok(Run { ended })
    }
}

/// `--net` of `weft vm run`.
fn weft_net(net: &Net) -> String {
    match net {
        Net::Tap(name) => format!("tap={name}"),
        Net::User { forwards } => forwards
            .iter()
            .fold("user,loopback".to_string(), |text, (host, guest)| {
                text + &format!(",forward={host}:{guest}")
            }),
    }
}

/// `-netdev` of QEMU, which leads to the host's loopback by itself.
fn qemu_net(net: &Net, index: usize) -> String {
    match net {
        Net::Tap(name) => {
            format!("tap,id=net{index},ifname={name},script=no,downscript=no,vhost=off")
        }
        Net::User { forwards } => forwards
            .iter()
            .fold(format!("user,id=net{index}"), |text, (host, guest)| {
                text + &format!(",hostfwd=tcp:127.0.0.1:{host}-:{guest}")
            }),
    }
}

/// A boot that ended well.
#[derive(Debug, Clone)]
pub struct Run {
    pub ended: Ended,
}

impl Run {
    /// Seconds from the start of the monitor to the guest's first program.
    pub fn user_space_s(&self) -> Option<f64> {
        self.ended
            .line(USER_SPACE)
            .map(|line| line.at.as_secs_f64())
    }

    /// What the guest's `bench` printed: `NAME VALUE UNIT`, keyed by name.
    pub fn figures(&self) -> BTreeMap<String, (f64, String)> {
        self.ended
            .lines
            .iter()
            .filter_map(|line| figure(&line.text))
            .collect()
    }
}

/// A line `NAME VALUE UNIT`, as the guest's programs print figures.
pub fn figure(text: &str) -> Option<(String, (f64, String))> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [name, value, unit] = words[..] else {
        return None;
    };
    Some((name.to_string(), (value.parse().ok()?, unit.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_an_archive() {
        let mut archive = Vec::new();
        for (name, data) in [("bin", ""), ("bin/one", "first"), ("bin/two", "second")] {
            let mut header = format!("070701{}", "0".repeat(104));
            header.replace_range(54..62, &format!("{:08x}", data.len()));
            header.replace_range(94..102, &format!("{:08x}", name.len() + 1));
            for part in [&(header + name + "\0"), data] {
                archive.extend_from_slice(part.as_bytes());
                archive.resize(archive.len().next_multiple_of(4), 0);
            }
        }
        assert_eq!(cpio_file(&archive, "two"), Some("second".as_bytes()));
        assert_eq!(cpio_file(&archive, "three"), None);
        assert_eq!(cpio_file(&archive[..150], "two"), None);
        let third = cpio_program("three", b"third");
        assert_eq!(cpio_file(&third, "three"), Some("third".as_bytes()));
    }

    #[test]
    fn figures_have_three_words() {
        assert_eq!(
            figure("spin 0.25 s"),
            Some(("spin".into(), (0.25, "s".into())))
        );
        assert_eq!(figure("weft-guest: exit 0"), None);
    }
}
