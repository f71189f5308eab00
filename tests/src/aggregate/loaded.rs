//! vCPUs that move while the guest uses all it has: interrupts between vCPUs (pipes), timers,
//! a counter with locked increments, a disk and a network. Each part checks itself. Needs
//! passt.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::moves::wander;
use super::{BOUND, Bench, TWO};
use crate::cluster::free_port;
use crate::guest::{Ended, Guest};
use crate::machines::{WARNINGS, check_boot};
use crate::web::fetch;

pub(super) const NAME: &str = "moves, under all loads";

/// Moves, and with `--long`.
const MOVES: usize = 1000;
const LONG_MOVES: usize = 100_000;
/// The file that goes through pipes, to the disk and to the host: the numbers below this.
const NUMBERS: usize = 40_000;
/// Its place on the disk: longer than it is.
const PLACE: &str = "256k";
const PLACES: usize = 4;
/// The parts of the load, as they report how often they ran.
const PARTS: [&str; 5] = ["pipe", "counter", "disk", "timer 1", "timer 2"];

fn script(length: usize) -> String {
    let last = NUMBERS - 1;
    let begun = "[ ! -e /tmp/stop ]";
    let part = |name: &str, work: &str| {
        format!("(i=0; while {begun}; do {work}; i=$((i+1)); done; echo {name} rounds $i) &")
    };
    let pipe = "b=$(taskset 1 cat $f | taskset 2 cat | taskset 1 md5sum); \
        [ \"$a\" = \"$b\" ] || echo WRONG pipe";
    let counter = "sharing -t 2 -n 100000 -l true >/tmp/s || echo WRONG counter";
    let disk = format!(
        "o=bs={PLACE}; p=$((i%{PLACES})); dd if=$f of=/dev/vda $o seek=$p conv=fsync 2>/dev/null; \
         echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda $o skip=$p count=1 2>/dev/null | \
         head -c {length} | cmp - $f || echo WRONG disk"
    );
    let timer = |cpu: u32| {
        part(
            &format!("timer {cpu}"),
            &format!("taskset {cpu} usleep 500"),
        )
    };
    format!(
        "mkdir /tmp/web; f=/tmp/web/file; seq 0 {last} >$f; httpd -p 80 -h /tmp/web; \
         a=$(md5sum <$f); {} {} {} {} {} echo at work; read word; touch /tmp/stop; \
         wait; {WARNINGS}",
        part("pipe", pipe),
        part("counter", counter),
        part("disk", &disk),
        timer(1),
        timer(2)
    )
}

pub(super) fn run(bench: &Bench<'_>) -> Result<String> {
    let content: String = (0..NUMBERS).map(|number| format!("{number}\n")).collect();
    let file = bench.run_directory.with_file_name("disk");
    std::fs::write(&file, vec![0; PLACES << 18])?;
    let port = free_port()?;
    let disk = format!("{},node=1", file.display());
    let net = format!("user,forward={port}:80,loopback,node=0");
    let mut options = TWO.options.to_vec();
    options.extend(["--name", "m", "--disk", &disk, "--net", &net]);
    let mut command = bench.machine(&options, &script(content.len()), "weft.net=dhcp")?;
    let mut guest = Guest::start(&mut command)?;
    let is_up = guest.wait_for("at work", BOUND);
    ensure!(is_up.is_some(), "no load: {:?}", guest.lines().last());
    let moves = if bench.plan.long { LONG_MOVES } else { MOVES };
    let is_over = AtomicBool::new(false);
    let begun = Instant::now();
    let (stop, fetched) = std::thread::scope(|scope| {
        let fetched = scope.spawn(|| fetch_until(port, content.as_bytes(), &is_over));
        let stop = wander(bench, TWO, &[0, 1], moves);
        is_over.store(true, Ordering::SeqCst);
        let fetched = fetched.join().ok().context("the client panicked")??;
        anyhow::Ok((stop?, fetched))
    })?;
    let rate = moves as f64 * 60.0 / begun.elapsed().as_secs_f64();
    guest.write("end\n")?;
    let ended = bench.finish(guest)?;
    let reasons = check_boot(&ended, TWO.cpus);
    ensure!(reasons.is_empty(), "{}", reasons.join("; "));
    let rounds = rounds(&ended)?;
    ensure!(fetched > 0, "nothing was fetched");
    Ok(format!(
        "{moves} moves, {rate:.0} a minute, median stop {} µs; {rounds}, {fetched} fetched",
        stop.as_micros()
    ))
}

/// Fetches the guest's file again and again; how often.
fn fetch_until(port: u16, content: &[u8], is_over: &AtomicBool) -> Result<usize> {
    let mut count = 0;
    while !is_over.load(Ordering::SeqCst) {
        let got = fetch(port, BOUND).with_context(|| format!("after {count} files"))?;
        ensure!(got == content, "{} bytes came, or others", got.len());
        count += 1;
    }
    Ok(count)
}

/// That each part ran, and found nothing wrong.
fn rounds(ended: &Ended) -> Result<String> {
    let wrong = ended.lines.iter().find(|line| line.text.contains("WRONG"));
    if let Some(wrong) = wrong {
        anyhow::bail!("{}\n{}", wrong.text, ended.tail(20));
    }
    let mut found = Vec::new();
    for part in PARTS {
        let start = format!("{part} rounds ");
        let line = ended
            .lines
            .iter()
            .find(|line| line.text.starts_with(&start));
        let line = line.with_context(|| format!("no {start}\n{}", ended.tail(20)))?;
        ensure!(line.text != format!("{start}0"), "{}", line.text);
        found.push(line.text.clone());
    }
    Ok(found.join(", "))
}
