//! One boot of a Linux guest, under `weft vm run` or under QEMU's TCG.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::guest::{Ended, Guest};
use anyhow::{Result, ensure};

/// What the guest's first program prints first.
pub const USER_SPACE: &str = "weft-guest: hello";

/// QEMU's quickest machine for this: q35 without what nobody uses here.
const TCG_MACHINE: &str = "q35,smm=off,vmport=off,sata=off";

/// Who runs the guest.
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

/// Where `make guest` and `make guest-debian` leave what they build.
#[derive(Debug, Clone)]
pub struct Images {
    /// The folder.
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

    /// The small kernel with the busybox image.
    pub fn small(&self, weft: &Path) -> Result<Boot> {
        Ok(Boot::new(
            weft,
            &self.file("vmlinux")?,
            &self.file("busybox.cpio")?,
        ))
    }
}

/// A guest.
#[derive(Debug, Clone)]
pub struct Boot {
    /// The `weft` command.
    pub weft: PathBuf,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: PathBuf,
    /// Disks, raw.
    pub disks: Vec<PathBuf>,
    /// vCPUs.
    pub cpus: usize,
    /// MiB of memory.
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
            weft: weft.to_path_buf(),
            kernel: kernel.to_path_buf(),
            initrd: initrd.to_path_buf(),
            disks: Vec::new(),
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

    fn weft_command(&self, backend: &str) -> Command {
        let mut command = Command::new(&self.weft);
        command.args(["vm", "run", "--no-reboot", "--backend", backend]);
        command.arg("--kernel").arg(&self.kernel);
        command.arg("--initrd").arg(&self.initrd);
        for disk in &self.disks {
            command.arg("--disk").arg(disk);
        }
        command.args(["--cpus", &self.cpus.to_string()]);
        command.args(["--memory", &format!("{}M", self.memory_mib)]);
        command.args(["--cmdline", &self.command_line()]);
        command.args(&self.options);
        command
    }

    fn qemu_command(&self) -> Command {
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-M",
            TCG_MACHINE,
            "-nodefaults",
        ]);
        command.args(["-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel);
        command.arg("-initrd").arg(&self.initrd);
        for (index, disk) in self.disks.iter().enumerate() {
            let drive = format!("file={},format=raw,if=none,id=disk{index}", disk.display());
            command.args(["-drive", &drive]);
            command.args(["-device", &format!("virtio-blk-pci,drive=disk{index}")]);
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

/// A boot that ended well.
#[derive(Debug, Clone)]
pub struct Run {
    /// How.
    pub ended: Ended,
}

impl Run {
    /// Seconds from the start of the monitor to the guest's first program.
    pub fn user_space_s(&self) -> Option<f64> {
        self.ended
            .line(USER_SPACE)
            .map(|line| line.at.as_secs_f64())
    }

    /// What the guest's `bench` printed: `NAME VALUE UNIT`, by name.
    pub fn figures(&self) -> BTreeMap<String, (f64, String)> {
        let figure = |text: &str| {
            let words: Vec<&str> = text.split_whitespace().collect();
            let [name, value, unit] = words[..] else {
                return None;
            };
            Some((name.to_string(), (value.parse().ok()?, unit.to_string())))
        };
        self.ended
            .lines
            .iter()
            .filter_map(|line| figure(&line.text))
            .collect()
    }
}
