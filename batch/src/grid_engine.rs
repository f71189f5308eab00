//! Grid Engine (8.1 and its kin), through `qsub`, `qstat` and `qdel`.
//!
//! At a job's end there is no TERM. With `-notify` USR2 comes the queue's `notify` before KILL,
//! at the limit and after `qdel`.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use jiff::tz::TimeZone;
use roxmltree::{Document, Node};

use crate::command::{Call, Said};
use crate::job::{self, Job, JobId, Wanted};
use crate::{BatchError, BatchSystem};

const SYSTEM: &str = "Grid Engine";
/// Grid Engine, with the cell that the environment names (`SGE_ROOT`, `SGE_CELL`).
#[derive(Clone, Copy, Debug, Default)]
pub struct GridEngine;

fn call(command: &'static str) -> Call {
    Call::new(SYSTEM, command)
}

/// Words that mean that the master does not answer.
const SILENT: [&str; 4] = [
    "commlib error",
    "unable to contact qmaster",
    "can't connect",
    "got send error",
];

fn done(said: Said) -> Result<String, BatchError> {
    match said.success {
        true => Ok(said.output),
        false => Err(said.failure(SYSTEM, &SILENT)),
    }
}

impl BatchSystem for GridEngine {
    fn name(&self) -> &'static str {
        "gridengine"
    }

    fn ask(&self, wanted: &Wanted) -> Result<JobId, BatchError> {
        let output = call("qsub")
            .arguments(["-terse", "-notify", "-r", "n", "-S", "/bin/sh", "-j", "y"])
            .arguments(["-l", &format!("h_rt={}", wanted.time.as_secs().max(1))])
            .arguments(["-o".as_ref(), wanted.output.as_os_str()])
            .arguments(["-wd".as_ref(), wanted.folder().as_os_str()])
            .arguments(&wanted.options)
            // It is found by this name, whatever the options say.
            .arguments(["-N", &wanted.name])
            .input(wanted.script())
            .run()
            .and_then(done)?;
        // Warnings may come before it.
        let id = output.lines().last();
        let id = id.and_then(|id| JobId::new(id.trim()));
        id.ok_or(BatchError::Unreadable {
            command: "qsub",
            said: output,
        })
    }

    fn jobs(&self, ids: &[JobId]) -> Result<BTreeMap<JobId, Job>, BatchError> {
        let found = read_jobs(&list()?)?.into_iter();
        let found = found.map(|(id, _, job)| (id, job)).collect();
        Ok(job::of_each(ids, found, SYSTEM))
    }

    fn names(&self) -> Result<Vec<(String, JobId)>, BatchError> {
        let found = read_jobs(&list()?)?.into_iter();
        Ok(found.map(|(id, name, _)| (name, id)).collect())
    }

    fn extend(&self, _: &JobId, _: SystemTime) -> Result<(), BatchError> {
        Err(BatchError::NoExtension { system: SYSTEM })
    }

    fn give_back(&self, id: &JobId) -> Result<(), BatchError> {
        let said = call("qdel").argument(id.as_str()).run()?;
        let text = format!("{} {}", said.output, said.error);
        let has_ended = text.contains("does not exist") || text.contains("already in deletion");
        match said.success || has_ended {
            true => Ok(()),
            false => Err(said.failure(SYSTEM, &SILENT)),
        }
    }
}

/// This user's jobs, as XML.
fn list() -> Result<String, BatchError> {
    // With -r it says what was asked for, so also for how long, and the whole name. Without -u:
    // this user's.
    call("qstat")
        .arguments(["-r", "-xml"])
        // Times come as local ones, without a zone.
        .environment("TZ", "UTC0")
        .run()
        .and_then(done)
}

fn unreadable(said: impl ToString) -> BatchError {
    BatchError::Unreadable {
        command: "qstat",
        said: said.to_string(),
    }
}

/// The number, the name and the state of each.
fn read_jobs(text: &str) -> Result<Vec<(JobId, String, Job)>, BatchError> {
    let document = Document::parse(text).map_err(unreadable)?;
    let jobs = document
        .descendants()
        .filter(|node| node.has_tag_name("job_list"));
    jobs.map(read_job).collect()
}

fn read_job(job: Node<'_, '_>) -> Result<(JobId, String, Job), BatchError> {
    let child = |name: &str| {
        let found = job.children().find(|node| node.has_tag_name(name));
        found
            .and_then(|node| node.text())
            .unwrap_or_default()
            .trim()
    };
    let number = child("JB_job_number");
    let id = JobId::new(number).ok_or_else(|| unreadable(format!("job {number:?}")))?;
    let (state, queue) = (child("state"), child("queue_name"));
    let host = queue.split_once('@').map(|(_, host)| host.to_owned());
    // In state t the execution host has not said yet that it runs; a `qdel` may leave USR2 out.
    let is_running = job.attribute("state") == Some("running") && !state.contains(['q', 't']);
    let job = match host {
        // It waits for an operator for ever.
        _ if state.contains('E') => Job::Ended {
            how: format!("Grid Engine has put it into the error state ({state})"),
        },
        Some(host) if is_running => {
            let limit = job.children().find(|node| {
                node.has_tag_name("hard_request") && node.attribute("name") == Some("h_rt")
            });
            let limit: Option<u64> = limit.and_then(|node| node.text()?.trim().parse().ok());
            let start = child("JAT_start_time").parse::<jiff::civil::DateTime>();
            let start = start.and_then(|start| start.to_zoned(TimeZone::UTC));
            let end = start.ok().zip(limit).map(|(start, limit)| {
                SystemTime::from(start.timestamp()) + Duration::from_secs(limit)
            });
            Job::Runs { host, until: end }
        }
        _ => Job::Waits {
            why: format!("state {state}"),
        },
    };
    Ok((id, child("full_job_name").to_owned(), job))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"<?xml version='1.0'?>
<job_info xmlns:xsd="http://x">
  <queue_info>
    <job_list state="running">
      <JB_job_number>12</JB_job_number>
      <state>r</state>
      <JAT_start_time>2026-11-27T11:46:40</JAT_start_time>
      <queue_name>main.q@h2</queue_name>
      <full_job_name>weft-a-1</full_job_name>
      <hard_request name="h_rt" resource_contribution="0.000000">900</hard_request>
    </job_list>
  </queue_info>
  <job_info>
    <job_list state="pending">
      <JB_job_number>13</JB_job_number>
      <state>qw</state>
      <JB_submission_time>2026-11-27T11:46:40</JB_submission_time>
      <queue_name></queue_name>
    </job_list>
    <job_list state="pending">
      <JB_job_number>14</JB_job_number>
      <state>Eqw</state>
    </job_list>
  </job_info>
</job_info>"#;

    #[test]
    fn jobs_are_read_from_a_list() {
        let jobs = read_jobs(LIST).unwrap();
        let names: Vec<&str> = jobs.iter().map(|(_, name, _)| name.as_str()).collect();
        assert_eq!(names, ["weft-a-1", "", ""]);
        let of = |jobs: &[(JobId, String, Job)], id: &str| {
            let mut jobs = jobs.iter();
            jobs.find(|job| job.0.as_str() == id).unwrap().2.clone()
        };
        let job = |id| of(&jobs, id);
        let until = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_780_000 + 900));
        let host = "h2".to_owned();
        assert_eq!(job("12"), Job::Runs { host, until });
        let waits = |why: &str| Job::Waits { why: why.into() };
        assert_eq!(job("13"), waits("state qw"));
        let sent = read_jobs(&LIST.replace("<state>r<", "<state>t<")).unwrap();
        assert_eq!(of(&sent, "12"), waits("state t"));
        assert!(matches!(job("14"), Job::Ended { .. }));
        for damaged in ["", "<job_info>", "<a><job_list/></a>"] {
            assert!(read_jobs(damaged).is_err(), "{damaged:?}");
        }
    }
}
