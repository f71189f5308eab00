//! Jobs, as all batch systems have them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// What a batch system calls a job: letters, digits, `.` and `_`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct JobId(String);

impl JobId {
    /// `None` if that is no name of a job.
    pub fn new(text: &str) -> Option<JobId> {
        let sound = |letter: char| letter.is_ascii_alphanumeric() || "._".contains(letter);
        let fits = (1..=64).contains(&text.len()) && text.chars().all(sound);
        fits.then(|| JobId(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl From<JobId> for String {
    fn from(id: JobId) -> String {
        id.0
    }
}

impl TryFrom<String> for JobId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<JobId, &'static str> {
        JobId::new(&text).ok_or("no name of a job")
    }
}

/// One host, and what runs there.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// What `squeue` and `qstat` show. Letters, digits, `-` and `_`; a letter first.
    pub name: String,
    /// How long. The system may round it up.
    pub time: Duration,
    /// A signal comes so long before the end, where the system can do that.
    pub warning: Duration,
    /// What the job is: a program by its absolute path, and its arguments.
    pub command: Vec<OsString>,
    /// Where its output goes: a file. The job works in its folder.
    pub output: PathBuf,
    /// Arguments for the system's own command, as a user gives them: a partition, a queue.
    pub options: Vec<OsString>,
}

impl Wanted {
    pub(crate) fn folder(&self) -> &Path {
        self.output.parent().unwrap_or(Path::new("/"))
    }

    /// The job as a script for `/bin/sh`. It becomes the program, which so gets the signals.
    pub(crate) fn script(&self) -> Vec<u8> {
        use std::os::unix::ffi::OsStrExt as _;
        let mut script = b"#!/bin/sh\nexec".to_vec();
        for word in &self.command {
            script.extend(b" '");
            for &byte in word.as_bytes() {
                match byte {
                    b'\'' => script.extend(b"'\\''"),
                    byte => script.push(byte),
                }
            }
            script.push(b'\'');
        }
        script.push(b'\n');
        script
    }
}

/// What a batch system says of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    Waits {
        /// In the system's own words.
        why: String,
    },
    Runs {
        host: String,
        /// `None`: the system does not say.
        until: Option<SystemTime>,
    },
    Ended {
        /// In the system's own words.
        how: String,
    },
}

/// For each of `ids` what was found of it. What a system does not know has ended: it forgets jobs
/// some time after their end.
pub(crate) fn of_each(
    ids: &[JobId],
    mut found: BTreeMap<JobId, Job>,
    system: &str,
) -> BTreeMap<JobId, Job> {
    let known = |id: &JobId| {
        let job = found.remove(id).unwrap_or_else(|| Job::Ended {
            how: format!("{system} does not know it any more"),
        });
        (id.clone(), job)
    };
    ids.iter().map(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_each_word_as_it_is() {
        let wanted = Wanted {
            name: "job".into(),
            time: Duration::from_secs(60),
            warning: Duration::ZERO,
            command: ["/bin/echo", "it's", "$HOME `a`", "two\nlines", ""]
                .map(OsString::from)
                .into(),
            output: "/dev/null".into(),
            options: Vec::new(),
        };
        let mut shell = std::process::Command::new("/bin/sh")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut shell.stdin.take().unwrap(), &wanted.script()).unwrap();
        let said = shell.wait_with_output().unwrap().stdout;
        assert_eq!(said, b"it's $HOME `a` two\nlines \n");
    }

    #[test]
    fn names_of_jobs_are_words() {
        for name in ["17", "17_3", "17.2", "a"] {
            assert_eq!(JobId::new(name).unwrap().as_str(), name);
        }
        for name in ["", "1 2", "-1", "1,2", "1\n", "é", &"1".repeat(65)] {
            assert!(JobId::new(name).is_none(), "{name:?}");
        }
        assert!(serde_json::from_str::<JobId>("\"1;2\"").is_err());
    }
}
