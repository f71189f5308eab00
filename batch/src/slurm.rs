//! Slurm (version 22.05 and later), through `sbatch`, `squeue`, `scontrol` and `scancel`.
//!
//! The text formats are used, not JSON: they are the same in all versions.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::command::{Call, Said};
use crate::job::{self, Job, JobId, Wanted};
use crate::{BatchError, BatchSystem};

const SYSTEM: &str = "Slurm";
/// Slurm, with the cluster that its configuration names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slurm;

fn call(command: &'static str) -> Call {
    Call::new(SYSTEM, command)
}

/// Words that mean that the controller does not answer.
const SILENT: [&str; 6] = [
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Unable to establish",
    "Slurm backup controller in standby",
];

fn done(said: Said) -> Result<String, BatchError> {
    match said.success {
        true => Ok(said.output),
        false => Err(said.failure(SYSTEM, &SILENT)),
    }
}

impl BatchSystem for Slurm {
    fn name(&self) -> &'static str {
        "slurm"
    }

    fn ask(&self, wanted: &Wanted) -> Result<JobId, BatchError> {
        let minutes = wanted.time.as_secs().div_ceil(60).max(1);
        let output = call("sbatch")
            .arguments([
                "--parsable",
                "--nodes=1",
                "--ntasks=1",
                "--exclusive",
                // All that the host has, where memory is given out, too (sbatch(1)).
                "--mem=0",
                "--no-requeue",
            ])
            .argument(format!("--time={minutes}"))
            // To the script alone, which is the program by then.
            .argument(format!("--signal=B:USR1@{}", wanted.warning.as_secs()))
            .arguments(["--output".as_ref(), wanted.output.as_os_str()])
            .arguments(["--chdir".as_ref(), wanted.folder().as_os_str()])
            .arguments(&wanted.options)
            // It is found by this name, whatever the options say.
            .argument(format!("--job-name={}", wanted.name))
            .input(wanted.script())
            .run()
            .and_then(done)?;
        // "ID" or "ID;CLUSTER".
        let id = output.trim().split(';').next().and_then(JobId::new);
        id.ok_or(BatchError::Unreadable {
            command: "sbatch",
            said: output,
        })
    }

    fn jobs(&self, ids: &[JobId]) -> Result<BTreeMap<JobId, Job>, BatchError> {
        let output = call("squeue")
            .arguments(["--noheader", "--me", "--states=all"])
            .argument("--format=%i|%T|%N|%e|%r")
            .environment("SLURM_TIME_FORMAT", "%s")
            .run()
            .and_then(done)?;
        // squeue shows the user's other jobs, too: an array that waits has a name like 7_[1-3].
        let ours = |line: &&str| {
            let id = line.split('|').next().and_then(JobId::new);
            id.is_some_and(|id| ids.contains(&id))
        };
        let found = output.lines().filter(ours).map(read_job);
        Ok(job::of_each(ids, found.collect::<Result<_, _>>()?, SYSTEM))
    }

    fn names(&self) -> Result<Vec<(String, JobId)>, BatchError> {
        // Without --states it shows jobs that wait, run or complete.
        let output = call("squeue")
            .arguments(["--noheader", "--me", "--format=%i|%j"])
            .run()
            .and_then(done)?;
        let named = output.lines().filter_map(|line| {
            let (id, name) = line.split_once('|')?;
            // The number of a waiting array, such as 7_[1-3], is no `JobId`: Weft submits no arrays.
            Some((name.to_owned(), JobId::new(id)?))
        });
        Ok(named.collect())
    }

    /// Most sites let operators alone do this.
    fn extend(&self, id: &JobId, until: SystemTime) -> Result<(), BatchError> {
        let until = jiff::Timestamp::try_from(until).map_err(|error| BatchError::System {
            what: "the new end".into(),
            error: std::io::Error::other(error),
        })?;
        call("scontrol")
            .argument("update")
            .argument(format!("JobId={id}"))
            .argument(format!("EndTime={}", until.strftime("%Y-%m-%dT%H:%M:%S")))
            // Slurm reads a local time.
            .environment("TZ", "UTC0")
            .run()
            .and_then(done)?;
        Ok(())
    }

    fn give_back(&self, id: &JobId) -> Result<(), BatchError> {
        let said = call("scancel").argument(id.as_str()).run()?;
        let has_ended =
            said.error.contains("already complet") || said.error.contains("Invalid job id");
        match said.success || has_ended {
            true => Ok(()),
            false => Err(said.failure(SYSTEM, &SILENT)),
        }
    }
}

/// `ID|STATE|HOST|END|REASON`.
fn read_job(line: &str) -> Result<(JobId, Job), BatchError> {
    let unreadable = || BatchError::Unreadable {
        command: "squeue",
        said: line.to_owned(),
    };
    let mut fields = line.splitn(5, '|');
    let mut field = || fields.next().ok_or_else(unreadable);
    let (id, state, host, end, reason) = (field()?, field()?, field()?, field()?, field()?);
    let job = match state {
        "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_HOLD" | "RESV_DEL_HOLD"
        | "SPECIAL_EXIT" => Job::Waits {
            why: reason.to_owned(),
        },
        // A job that completes has no host to give any more.
        "RUNNING" | "SUSPENDED" | "RESIZING" | "SIGNALING" | "STAGE_OUT" | "STOPPED" => {
            let seconds: Option<u64> = end.parse().ok();
            Job::Runs {
                host: host.to_owned(),
                until: seconds.map(|s| SystemTime::UNIX_EPOCH + Duration::from_secs(s)),
            }
        }
        _ => Job::Ended {
            how: match reason {
                "None" | "" => state.to_owned(),
                reason => format!("{state}: {reason}"),
            },
        },
    };
    Ok((JobId::new(id).ok_or_else(unreadable)?, job))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_read_from_lines() {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        let job = |line| read_job(line).unwrap().1;
        let waits = |why: &str| Job::Waits { why: why.into() };
        assert_eq!(job("7|PENDING||N/A|Resources"), waits("Resources"));
        assert_eq!(job("7|PENDING||N/A|a|b"), waits("a|b"));
        let runs = |until| Job::Runs {
            host: "h1".into(),
            until,
        };
        assert_eq!(job("7|RUNNING|h1|1796000000|None"), runs(at(1_796_000_000)));
        assert_eq!(job("7|RUNNING|h1|N/A|None"), runs(None));
        let ended = |how: &str| Job::Ended { how: how.into() };
        assert_eq!(job("7|COMPLETING|h1|1|None"), ended("COMPLETING"));
        assert_eq!(job("7|TIMEOUT||1|TimeLimit"), ended("TIMEOUT: TimeLimit"));
        for line in ["", "7|RUNNING", "x y|RUNNING|h1|1|None"] {
            assert!(read_job(line).is_err(), "{line:?}");
        }
    }
}
