//! The last complete set loads, wherever a save is killed. Needs `ptrace`, no privilege.
//!
//! Without arguments this program runs each kind of save again and again as `--save KIND
//! DIRECTORY`, and kills it before its first system call, its second, and so on to its last;
//! and behind the first half of each write. Then it judges what is in the directory:
//!
//! - the set that was being written is refused as incomplete, or does not exist, until its
//!   manifest has its name; from then on it is complete, and every page and its state are right;
//! - the last complete set is as it was;
//! - before the manifest gets its name all files and their names are on disk, as far as the
//!   order of the calls says.

mod saves;
mod tracer;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use weft_checkpoint::{CheckpointError, PAGE_BYTES, Set};

use saves::{Kind, LAST, Memory, NEW, bytes_of};
use tracer::{End, Moment, NotTraced, Outcome};

/// More calls than a save makes: this test ends.
const CALLS_MAX: usize = 2000;
/// Longest time of all of it: a signal ends this program, and with it the child.
const SECONDS_MAX: u32 = 300;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [option, kind, directory] = &words[..]
        && option == "--save"
    {
        let kind = Kind::ALL.into_iter().find(|known| known.name() == kind);
        saves::save(kind.expect("a kind"), Path::new(directory));
        return ExitCode::SUCCESS;
    }
    nix::unistd::alarm::set(SECONDS_MAX);
    let scratch = Scratch::new();
    saves::write_last(&scratch.0);
    for kind in Kind::ALL {
        match kill_at_each_call(kind, &scratch.0) {
            Ok((calls, kills)) => println!("killed: {}: {calls} calls, {kills} kills", kind.name()),
            Err(NotTraced(why)) => {
                eprintln!("skipped: saves that are killed: no ptrace here: {why}");
                break;
            }
        }
    }
    ExitCode::SUCCESS
}

struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let name = format!("weft-checkpoint-killed-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(fs::canonicalize(path).unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How many calls the save makes, and how often it was killed.
fn kill_at_each_call(kind: Kind, directory: &Path) -> Result<(usize, usize), NotTraced> {
    let mut kills = 0;
    for number in 0..CALLS_MAX {
        let outcome = kill(kind, directory, Moment::Before(number))?;
        let End::Killed { can_be_halved } = outcome.end else {
            assert_eq!(outcome.renames, usize::from(kind.commits()));
            assert!(number > 0, "the save makes no calls");
            return Ok((number, kills));
        };
        kills += 1;
        if can_be_halved {
            kill(kind, directory, Moment::Halfway(number))?;
            kills += 1;
        }
    }
    panic!("the save does not end");
}

fn kill(kind: Kind, directory: &Path, moment: Moment) -> Result<Outcome, NotTraced> {
    saves::prepare(kind, directory);
    let outcome = tracer::run(&["--save", kind.name()], directory, moment)?;
    let what = format!("{}, killed {moment:?}: {:?}", kind.name(), outcome.last);
    judge_new(kind, &outcome, directory, &what);
    judge_set(&directory.join(LAST), &saves::memory_of_last(), LAST, &what);
    judge_order(&outcome, directory, &what);
    Ok(outcome)
}

/// Everything that the manifest names was flushed before the manifest got its name; at the end
/// of the save, that name was, too.
fn judge_order(outcome: &Outcome, directory: &Path, what: &str) {
    let new = directory.join(NEW);
    let not_flushed: Vec<_> = outcome
        .unflushed_at_rename
        .iter()
        .filter(|path| path.starts_with(&new))
        .collect();
    assert!(
        not_flushed.is_empty(),
        "{what}: not on disk: {not_flushed:?}"
    );
    if let (End::Ended, 1..) = (&outcome.end, outcome.renames) {
        assert!(
            outcome.unflushed.is_empty(),
            "{what}: not on disk: {:?}",
            outcome.unflushed
        );
    }
}

/// The set that was being written.
fn judge_new(kind: Kind, outcome: &Outcome, directory: &Path, what: &str) {
    let new = directory.join(NEW);
    if outcome.renames > 0 {
        return judge_set(&new, &kind.memory(), NEW, what);
    }
    let has_files = fs::read_dir(&new).is_ok_and(|mut entries| entries.next().is_some());
    let error = Set::open(&new).expect_err(what);
    let is_right = match &error {
        CheckpointError::Incomplete(path) => has_files && *path == new,
        CheckpointError::NoCheckpoint(path) => !has_files && *path == new,
        _ => false,
    };
    assert!(is_right, "{what}: {error} (has files: {has_files})");
}

/// A complete set, byte for byte.
fn judge_set(directory: &Path, memory: &Memory, name: &str, what: &str) {
    let set = Set::open(directory).unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
    let right = set.verify();
    right.unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
    assert_eq!(set.state().unwrap(), saves::state_of(name), "{what}");
    let mut left = memory.clone();
    let source = set.pages_source().unwrap();
    let read = source.read_all(&(0..u64::MAX), |first, bytes| {
        for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
            let version = left.remove(&page);
            let expected = version.map(|version| bytes_of(page, version));
            assert!(
                expected.is_some_and(|expected| bytes == expected),
                "{what}: {name}: page {page} is wrong"
            );
        }
        Ok::<_, CheckpointError>(())
    });
    read.unwrap();
    assert!(
        left.is_empty(),
        "{what}: {name}: pages are missing: {left:?}"
    );
}
