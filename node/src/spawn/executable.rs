//! The programs that Weft starts beside itself.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::{fmt, io};

use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;

/// A program that is installed beside `weft`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramKind {
    /// `weft-runtime`, which is home and every slice of a program.
    Runtime,
    /// `weft-monitor`, which is every node of a virtual machine.
    Monitor,
}

impl ProgramKind {
    fn file(self) -> &'static str {
        match self {
            ProgramKind::Runtime => "weft-runtime",
            ProgramKind::Monitor => "weft-monitor",
        }
    }

    /// For a sentence about a process that executes it.
    pub fn noun(self) -> &'static str {
        match self {
            ProgramKind::Runtime => "runtime",
            ProgramKind::Monitor => "monitor",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            ProgramKind::Runtime => "WEFT_RUNTIME",
            ProgramKind::Monitor => "WEFT_MONITOR",
        }
    }
}

/// No file where one of them should be.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the {kind} was not found in {searched}: {}", self.fix())]
pub struct Missing {
    kind: ProgramKind,
    /// Where it was looked for.
    pub searched: String,
}

impl fmt::Display for ProgramKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} `{}`", self.noun(), self.file())
    }
}

impl Missing {
    /// What to do about it.
    pub fn fix(&self) -> String {
        format!("install it beside `weft`, or set {}", self.kind.variable())
    }
}

/// An executable file, opened once: what is started later is this file, also when
/// a newer one was installed over it since.
#[derive(Debug)]
pub struct Executable {
    path: PathBuf,
    file: OwnedFd,
}

impl Executable {
    /// Finds a program of Weft's: where its variable says (`$WEFT_RUNTIME`,
    /// `$WEFT_MONITOR`), beside this executable, or in `../lib/weft`.
    ///
    /// # Errors
    /// Where it was looked for.
    pub fn find(kind: ProgramKind) -> Result<Executable, Missing> {
        let missing = |searched| Missing { kind, searched };
        if let Some(path) = std::env::var_os(kind.variable()).filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            let named = format!("{} (from {})", path.display(), kind.variable());
            return Executable::file(&path).ok_or_else(|| missing(named));
        }
        let executable = std::env::current_exe().map_err(|error| missing(error.to_string()))?;
        let directory = executable.parent().unwrap_or(Path::new("/"));
        let places = [
            directory.join(kind.file()),
            directory.join("../lib/weft").join(kind.file()),
        ];
        let found = places.iter().find_map(|path| Executable::file(path));
        found.ok_or_else(|| {
            let names = places.each_ref().map(|path| path.display().to_string());
            missing(names.join(" and "))
        })
    }

    fn file(path: &Path) -> Option<Executable> {
        path.is_file().then(|| Executable::open(path).ok())?
    }

    /// The file at `path`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(path: &Path) -> io::Result<Executable> {
        Ok(Executable {
            path: path.to_owned(),
            file: open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?,
        })
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another descriptor of the file, at `number` or above.
    pub(super) fn descriptor(&self, number: RawFd) -> io::Result<OwnedFd> {
        let copy = fcntl(&self.file, FcntlArg::F_DUPFD_CLOEXEC(number))?;
        // SAFETY: the kernel has just made it, and nobody else knows of it.
        Ok(unsafe { OwnedFd::from_raw_fd(copy) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn::{self, Ended, Role};

    #[test]
    fn what_is_missing_says_where_it_was_looked_for() {
        // No test of this crate has a monitor beside it.
        let missing = Executable::find(ProgramKind::Monitor)
            .unwrap_err()
            .to_string();
        assert!(
            missing.starts_with("the monitor `weft-monitor` was not found in /")
                && missing.ends_with("install it beside `weft`, or set WEFT_MONITOR"),
            "{missing}"
        );
    }

    /// Another process writes what is executed: a child that another thread forks just now has a
    /// copy of what this one has open, and Linux executes no file that is open for writing.
    fn copy(from: &str, to: &std::path::Path) {
        let copied = std::process::Command::new("cp").arg(from).arg(to).status();
        assert!(copied.unwrap().success());
    }

    #[test]
    fn a_file_that_was_replaced_is_started_all_the_same() {
        let path = std::env::temp_dir().join(format!("weft-executable-{}", std::process::id()));
        copy("/bin/true", &path);
        let executable = Executable::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        copy("/bin/false", &path);
        let role = Role::Slice {
            name: "true",
            confinement: None,
            keeps_errors: true,
            group: None,
        };
        let mut process = spawn::start(&executable, &role).unwrap();
        let ended = process.end_within(std::time::Duration::from_secs(5));
        assert_eq!(ended.unwrap(), Ended::Exited(0));
        std::fs::remove_file(&path).unwrap();
    }
}
