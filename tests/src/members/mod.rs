//! `weft cluster`, and `--cluster`: several hosts on this one, with a real etcd.

mod hosts;
mod page;
mod site;
mod soak;
mod work;

use std::time::{Duration, Instant};

use anyhow::Result;

use self::site::Site;
pub use self::soak::Soak;
use crate::context::Context;
use crate::report::{Report, Verdict};

/// The same hosts over `weft cluster store`.
const WITHOUT_ETCD: &str = "cluster: hosts without an etcd";

type Check = fn(&mut Site<'_>) -> Result<()>;

/// A check cannot run here: this is not installed.
#[derive(Debug, thiserror::Error)]
#[error("needs {0}")]
struct Lacks(&'static str);

/// Runs the suite, and its long test where it is wanted.
pub fn run_members(context: &Context, soak: Option<&Soak>, names: &[String], report: &Report) {
    run_part(context, "cluster: hosts", &hosts::CHECKS, names, report);
    run_part(context, WITHOUT_ETCD, &hosts::CHECKS, names, report);
    run_part(context, "cluster: work", &work::CHECKS, names, report);
    run_part(context, "cluster: page", &page::CHECKS, names, report);
    if let Some(soak) = soak {
        soak::run(context, soak, names, report);
    }
}

/// In their order: each check goes on where the one before ended.
fn run_part(
    context: &Context,
    part: &str,
    checks: &[(&str, Check)],
    names: &[String],
    report: &Report,
) {
    if !names.is_empty() && !names.iter().any(|name| part.contains(name.as_str())) {
        return;
    }
    let has_etcd = part != WITHOUT_ETCD;
    if has_etcd && context.tool("etcd").is_none() {
        let why = "needs etcd (Debian package etcd-server)".to_owned();
        report.add(part, Duration::ZERO, Verdict::Skipped(why));
        return;
    }
    let mut site = match Site::new(context, &part.replace(": ", "-"), has_etcd) {
        Ok(site) => site,
        Err(error) => {
            let reasons = vec![format!("{error:#}")];
            report.add(part, Duration::ZERO, Verdict::Failed(reasons));
            return;
        }
    };
    for (name, check) in checks {
        let begun = Instant::now();
        let verdict = match check(&mut site) {
            Ok(()) => Verdict::Passed(String::new()),
            Err(error) if error.is::<Lacks>() => Verdict::Skipped(error.to_string()),
            Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
        };
        report.add(&format!("{part} {name}"), begun.elapsed(), verdict);
    }
}
