//! Clusters of two users on one host, which do not see each other.

use std::path::Path;

use anyhow::{Result, ensure};

use super::user::text;
use super::{BOOT_BOUND, Bench, END_BOUND};

/// Users who have nothing else.
const USERS: [u32; 2] = [61_001, 61_002];

pub fn apart(bench: &Bench<'_>) -> Result<String> {
    bench.needs_root()?;
    let [a, b] = [
        bench.user_as(Some(USERS[0]))?,
        bench.user_as(Some(USERS[1]))?,
    ];
    let mut of_a = a.run("c", &["--vms", "1"])?;
    let mut of_b = b.run("c", &["--vms", "2"])?;
    let status = a.until(&mut of_a, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    b.until(&mut of_b, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    ensure!(
        status.0["machines"].as_array().map(Vec::len) == Some(1),
        "{}",
        status.0
    );
    // The machines have the same addresses, in networks that do not meet.
    let reach = "ssh -y -y 10.77.0.2 hostname";
    let own = b.ask(&["ssh", "c", "0", "--", reach])?;
    ensure!(text(&own.stdout) == "vm-1\n", "{own:?}");
    let reached = format!("timeout 10 {reach}; echo ended with $?");
    let other = a.must(&["ssh", "c", "0", "--", &reached])?;
    ensure!(
        other.starts_with("ended with ") && other != "ended with 0\n",
        "it reached the other user's machine, or nothing was tried: {other}"
    );
    let id = |user: &super::user::User| user.must(&["ssh", "c", "0", "--", "cat /etc/machine-id"]);
    ensure!(id(&a)? != id(&b)?, "two machines have one id");
    // Files and sockets of one are nothing for the other.
    for path in [b.state().join("c"), b.run_directory().join("weft/mpi")] {
        let output = a.command(Path::new("ls")).arg(&path).output()?;
        ensure!(
            !output.status.success(),
            "{} is open: {output:?}",
            path.display()
        );
    }
    let mut asks = a.command(&a.weft);
    let asks = asks.env("XDG_RUNTIME_DIR", b.run_directory());
    let asked = asks.args(["mpi", "status", "c"]).output()?;
    ensure!(!asked.status.success(), "{asked:?}");
    for folder in super::processes::agents(&b.tag).keys() {
        let output = a.command(Path::new("ls")).arg(folder).output()?;
        ensure!(!output.status.success(), "{folder} is open: {output:?}");
    }
    a.must(&["exit"])?;
    of_a.must_end(0, END_BOUND)?;
    a.nothing_left(false)?;
    ensure!(
        b.status("c")?.is_running(),
        "the other cluster was ended, too"
    );
    b.must(&["exit"])?;
    of_b.must_end(0, END_BOUND)?;
    b.nothing_left(false)?;
    Ok(String::new())
}
