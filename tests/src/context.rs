//! What every test needs: where things are, and a place to work.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::run::{End, Invocation, run};

/// Where things are. The work directory is removed by [`Context::clean`].
#[derive(Debug, Clone)]
pub struct Context {
    /// The `weft` under test.
    pub weft: PathBuf,
    /// The programs of `tests/programs` and `bench/elastic`, built.
    pub programs: PathBuf,
    /// `tests/programs`: scripts and sources.
    pub sources: PathBuf,
    /// Generated texts.
    pub inputs: PathBuf,
    /// Everything that a run writes.
    pub work: PathBuf,
    /// From which random moments are drawn.
    pub seed: u64,
}

/// Sizes of the generated texts, MiB.
const TEXTS_MIB: [u64; 3] = [2, 8, 24];

fn absolute(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).with_context(|| format!("{} is missing", path.display()))
}

impl Context {
    /// Finds everything and generates the texts.
    pub fn new(weft: &Path, programs: &Path, sources: &Path, seed: u64) -> Result<Context> {
        let work = std::env::temp_dir().join(format!("weft-e2e-{}", std::process::id()));
        let context = Context {
            weft: absolute(weft).context("build it with `make build`")?,
            programs: absolute(programs).context("build them with `make programs`")?,
            sources: absolute(sources)?,
            inputs: work.join("inputs"),
            work,
            seed,
        };
        fs::create_dir_all(&context.inputs)?;
        for size_mib in TEXTS_MIB {
            context.generate_text(size_mib)?;
        }
        Ok(context)
    }

    fn generate_text(&self, size_mib: u64) -> Result<()> {
        let scratch = self.work.join("generate");
        let command = [
            self.programs.join("text").into_os_string(),
            size_mib.to_string().into(),
        ];
        let outcome = run(&Invocation::new(&command, &scratch))?;
        ensure!(
            outcome.end == End::Exit(0),
            "text generator: {}: {}",
            outcome.end,
            outcome.stderr
        );
        fs::rename(outcome.stdout, self.inputs.join(format!("text-{size_mib}")))?;
        Ok(())
    }

    /// Replaces `{programs}`, `{sources}`, `{inputs}` and `{python}`.
    pub fn fill(&self, text: &str) -> String {
        let python = self.tool("python3").unwrap_or_else(|| "python3".into());
        text.replace("{programs}", &self.programs.to_string_lossy())
            .replace("{sources}", &self.sources.to_string_lossy())
            .replace("{inputs}", &self.inputs.to_string_lossy())
            .replace("{python}", &python.to_string_lossy())
    }

    /// The path of a tool that is a real program, not a wrapper script in
    /// someone's home; system directories first.
    pub fn tool(&self, name: &str) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let system = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(PathBuf::from);
        system
            .into_iter()
            .chain(std::env::split_paths(&path))
            .map(|directory| directory.join(name))
            .find(|candidate| candidate.is_file())
    }

    /// A fresh, empty directory for one run.
    pub fn directory(&self, name: &str) -> Result<PathBuf> {
        let directory = self.work.join(file_name(name));
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::create_dir_all(&directory)?;
        Ok(directory)
    }

    /// Whether this process is root.
    pub fn is_root(&self) -> bool {
        nix::unistd::geteuid().is_root()
    }

    /// What `weft list` says, for a report about a hang; bounded.
    pub fn weft_list(&self) -> String {
        let directory = self.work.join("list");
        let command = [self.weft.clone().into_os_string(), "list".into()];
        let invocation = Invocation::new(&command, &directory).bounded(Duration::from_secs(5));
        match run(&invocation) {
            Ok(outcome) => format!(
                "{}{}",
                fs::read_to_string(&outcome.stdout).unwrap_or_default(),
                outcome.stderr
            ),
            Err(error) => format!("weft list: {error:#}"),
        }
    }

    /// Removes the work directory.
    pub fn clean(&self) {
        if let Err(error) = fs::remove_dir_all(&self.work) {
            eprintln!("cannot remove {}: {error}", self.work.display());
        }
    }
}

/// Why no machine can run on KVM here, if so; tried as a machine would.
pub fn kvm_missing() -> Option<String> {
    const DEVICE: &str = "/dev/kvm";
    let opened = fs::File::options().read(true).write(true).open(DEVICE);
    let error = opened.err()?;
    Some(format!("{DEVICE} cannot be opened: {error}"))
}

/// Why no machine can lie over several nodes on KVM here, if so: besides KVM, that
/// needs the faults of the kernel, which not everybody may see.
pub fn kvm_nodes_missing() -> Option<String> {
    if let Some(why) = kvm_missing() {
        return Some(why);
    }
    const DEVICE: &str = "/dev/userfaultfd";
    const SWITCH: &str = "/proc/sys/vm/unprivileged_userfaultfd";
    let opened = fs::File::options().read(true).write(true).open(DEVICE);
    let allowed = fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "1");
    match opened {
        Err(error) if !allowed => Some(format!(
            "{DEVICE} cannot be opened ({error}), and {SWITCH} is not 1"
        )),
        _ => None,
    }
}

/// Whether a command of the system exists and accepts `--version` or the like;
/// used to decide about skips.
pub fn works(command: &str, arguments: &[&str]) -> bool {
    Command::new(command)
        .args(arguments)
        .output()
        .is_ok_and(|output| output.status.success())
}

/// The longest name of a test's folder: a UNIX socket's path in it has at most 107 bytes.
const NAME_MAX: usize = 48;

/// The name of a test's folder. A long one ends with a digest of the test's name.
fn file_name(test: &str) -> String {
    let name = test.replace(['/', ' ', ','], "-");
    if name.len() <= NAME_MAX {
        return name;
    }
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let digest = hasher.finish() as u32;
    let kept: String = name.chars().take(NAME_MAX - 9).collect();
    format!("{kept}-{digest:08x}")
}
