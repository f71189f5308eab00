//! nginx on the vCPU of a node that does not have the network, asked by ApacheBench:
//! FragVisor's figure 6 with the paper's own programs.
//!
//! nginx is that of the Debian guest image, ApacheBench Debian's own, unpacked by the
//! guests' recipe with all that it loads (`target/guest/clients`) and started by its
//! own loader: so it runs on any host, and nothing is installed for it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use weft_tests::boot::{Boot, Disk, Images, Monitor};
use weft_tests::guest::Guest;
use weft_tests::namespace::{self, TapHost};

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};
use crate::vm::way::Way;

/// KiB of what is asked for.
const SIZES_KIB: [u32; 5] = [1, 4, 16, 64, 256];
/// From here on a node elsewhere is to cost next to nothing.
const LARGE_KIB: u32 = 64;
/// Up to here shared memory is to cost several times as much.
const SMALL_KIB: u32 = 4;
/// Requests of each size, and how many are under way: those of the paper.
const REQUESTS: u32 = 1000;
const CONNECTIONS: u32 = 10;
/// Longest time that one size may take: then fewer requests make the figure.
const SIZE_TIME_S: u32 = 6;
/// Requests of a size that go before, uncounted, and how long they may take.
const WARM_REQUESTS: u32 = 100;
const WARM_TIME_S: u32 = 2;
/// How long one answer may take.
const ANSWER_S: u32 = 20;
/// What ApacheBench says when it took longer (APR_TIMEUP).
const TIMED_OUT: &str = "(70007)";
/// How long the guest may take until its server answers, and to end.
const START: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(30);

/// Options of `weft vm run`. Both vCPUs are up from the start, as a server's are: those
/// that come later get `nohz_full=`, which is good for computing only.
fn options(way: Way) -> Vec<String> {
    let net = format!("tap={}{}", TapHost::DEVICE, way.place());
    let nodes: &[&str] = match way {
        Way::Local => &[],
        _ => &["--nodes", "2", "--late-cpus", "no"],
    };
    let nodes = nodes.iter().map(ToString::to_string);
    nodes.chain(["--net".into(), net]).collect()
}

/// Requests a second by way and size.
type Samples = BTreeMap<(Way, u32), Vec<f64>>;

/// The table `vm-nodes-nginx`.
///
/// # Errors
/// No images, not root, a guest that does not end well, or requests that fail.
pub fn nginx(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let base = base(place, images)?;
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for way in Way::ALL {
            let rates = measure(&base, images, way).with_context(|| way.name())?;
            for (size, rate) in SIZES_KIB.into_iter().zip(rates) {
                samples.entry((way, size)).or_default().push(rate);
            }
        }
    }
    Ok(table(&samples))
}

/// A guest of two vCPUs, and a network, with Debian's user land. Of both kernels it has that which is
/// made for several nodes, on one node, too.
pub(super) fn base(place: &Place, images: &Images) -> Result<Boot> {
    let mut base = images.aggregate(&place.weft)?;
    base.cpus = 2;
    base.memory_mib = 512;
    base.disks = vec![Disk::new(&images.file("debian/root.ext4")?).read_only()];
    base.words = format!("root=/dev/vda ro weft.net={}/24", TapHost::GUEST);
    Ok(base)
}

/// What the guest runs until it gets a line: one worker of nginx, and its files, both
/// on vCPU 1.
fn script() -> String {
    format!("{} read line; kill $!; wait $!", nginx_on(2, &SIZES_KIB))
}

/// Commands that start one worker of nginx with documents of these sizes on the vCPUs of a mask.
pub(super) fn nginx_on(mask: u32, sizes_kib: &[u32]) -> String {
    let sizes: Vec<String> = sizes_kib.iter().map(u32::to_string).collect();
    let sizes = sizes.join(" ");
    format!(
        "mkdir /run/www; for k in {sizes}; do \
         taskset {mask} head -c ${{k}}K /dev/zero >/run/www/$k; done; \
         echo 'daemon off; worker_processes 1; pid /run/nginx.pid; error_log stderr; \
         events {{}} http {{ access_log off; sendfile on; client_body_temp_path /run/b; \
         proxy_temp_path /run/p; fastcgi_temp_path /run/f; uwsgi_temp_path /run/u; \
         scgi_temp_path /run/s; server {{ listen 80; root /run/www; }} }}' >/run/conf; \
         taskset {mask} nginx -e stderr -c /run/conf &"
    )
}

/// Boots a machine whose server is on vCPU 1, and asks it.
fn measure(base: &Boot, images: &Images, way: Way) -> Result<Vec<f64>> {
    let host = TapHost::new()?;
    let client = Client::new(images, &host)?;
    let mut boot = base.running(&script());
    boot.prefix = host.prefix();
    boot.options = options(way);
    let mut guest = boot.start(Monitor::Soft)?;
    let rates = ask_all(&client, &mut guest);
    // It may have ended, which is told below.
    let _ = guest.write("\n");
    let ended = guest.finish(END)?;
    ensure!(
        ended.ended_well(),
        "the guest did not end well: {}\n{}",
        ended.stderr.trim(),
        ended.tail(8)
    );
    rates.with_context(|| ended.tail(8))
}

/// Requests a second of each size.
fn ask_all(client: &Client, guest: &mut Guest) -> Result<Vec<f64>> {
    client.wait(SIZES_KIB[0], guest)?;
    let rate = |size| {
        client.ask(size, WARM_REQUESTS, WARM_TIME_S)?;
        client.ask(size, REQUESTS, SIZE_TIME_S)
    };
    SIZES_KIB.into_iter().map(rate).collect()
}

/// ApacheBench in the namespace that has the tap device.
pub(super) struct Client(Vec<OsString>);

impl Client {
    pub fn new(images: &Images, host: &TapHost) -> Result<Self> {
        let mut words = host.prefix();
        let program = images.file("clients/ab")?;
        words.push(images.file("clients/ld-linux-x86-64.so.2")?.into());
        words.push("--library-path".into());
        words.push(images.folder.join("clients").into());
        words.push(program.into());
        Ok(Self(words))
    }

    /// Waits until the guest answers.
    pub fn wait(&self, size_kib: u32, guest: &mut Guest) -> Result<()> {
        let deadline = Instant::now() + START;
        while let Err(error) = self.run(size_kib, 1, 1, WARM_TIME_S) {
            ensure!(Instant::now() < deadline, "no answer: {error:#}");
            ensure!(guest.is_running()?, "the guest ended");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Requests per second and the number of requests; fewer when they take longer than `time_s`.
    pub fn ask(&self, size_kib: u32, requests: u32, time_s: u32) -> Result<f64> {
        let said = match self.run(size_kib, requests, CONNECTIONS, time_s) {
            // ApacheBench may stop writing to connections that are established, waits for
            // answers, and gives up: one run in some thirty, whatever the way. A connection
            // that is refused or reset is another matter.
            Err(error) if format!("{error:#}").contains(TIMED_OUT) => {
                eprintln!("weft-bench: {size_kib} KB once more, for {error:#}");
                self.run(size_kib, requests, CONNECTIONS, time_s)?
            }
            said => said?,
        };
        parse(&said, u64::from(size_kib) << 10).with_context(|| format!("ab said:\n{said}"))
    }

    /// What ApacheBench says, unless it gives up.
    fn run(&self, size_kib: u32, requests: u32, connections: u32, time_s: u32) -> Result<String> {
        // A bound of time sets that of requests, which is therefore behind it.
        let options = format!("-q -s {ANSWER_S} -t {time_s} -n {requests} -c {connections}");
        let address = format!("http://{}/{size_kib}", TapHost::GUEST);
        let (program, words) = self.0.split_first().context("no client")?;
        let output = Command::new(program)
            .args(words)
            .args(options.split(' '))
            .arg(address)
            .output()?;
        ensure!(
            output.status.success(),
            "ab: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Requests a second, out of what ApacheBench says, if each got a document of that
/// length.
fn parse(said: &str, bytes: u64) -> Result<f64> {
    let number = |name: &str| -> Option<f64> {
        let line = said.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    ensure!(
        number("Document Length:") == Some(bytes as f64)
            && number("Failed requests:") == Some(0.0)
            && number("Non-2xx responses:").is_none(),
        "requests failed"
    );
    number("Requests per second:").context("no rate")
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-nodes-nginx",
        "nginx (Debian's, one worker) on vCPU 1 of a guest of two (Debian's user land, the aggregate kernel, the software vCPU), asked by ApacheBench on the host over a tap device: 1000 requests of each size, or as many as 6 s allow, 10 at a time, a connection each (FragVisor's figure 6). The machine is on one node (local), or on two of this host (TCP), a vCPU each: with the network at vCPU 1's node (beside), or at vCPU 0's, past the shared memory (bypass) or through it (DSM). In alternation; requests a second.",
        &[
            "size",
            "local",
            "beside",
            "bypass",
            "DSM",
            "bypass / local",
            "goal",
            "met",
            "bypass / DSM",
            "goal",
            "met",
            "beside / local",
            "bypass / beside",
        ],
    );
    for size in SIZES_KIB {
        let of = |way| median(samples.get(&(way, size))?);
        let [local, beside, bypass, dsm] = Way::ALL.map(of);
        let ratio = |one: Option<f64>, other: Option<f64>| one.zip(other).map(|(a, b)| a / b);
        let of_local = match size {
            LARGE_KIB.. => Goal::AtLeast(0.9),
            _ => Goal::None,
        };
        let of_dsm = match size {
            ..=SMALL_KIB => Goal::AtLeast(5.0),
            _ => Goal::None,
        };
        let mut row = vec![format!("{size} KB")];
        row.extend([local, beside, bypass, dsm].map(digits));
        for (other, goal) in [(local, of_local), (dsm, of_dsm)] {
            let ratio = ratio(bypass, other);
            row.push(digits(ratio));
            row.extend(goal.cells(ratio));
        }
        row.extend([ratio(beside, local), ratio(bypass, beside)].map(digits));
        table.rows.push(row);
    }
    let named: BTreeMap<String, &Vec<f64>> = samples
        .iter()
        .map(|((way, size), values)| (format!("{}, {size} KB", way.name()), values))
        .collect();
    table.samples = json!({ "requests_per_s": named });
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "Document Path:          /64
Document Length:        65536 bytes

Concurrency Level:      10
Time taken for tests:   0.352 seconds
Complete requests:      1000
Failed requests:        0
Total transferred:      65770000 bytes
Requests per second:    2840.91 [#/sec] (mean)
Time per request:       3.520 [ms] (mean)
";

    #[test]
    fn what_the_client_says_is_read() {
        assert_eq!(parse(SAID, 64 << 10).unwrap(), 2840.91);
    }

    #[test]
    fn requests_that_failed_make_no_figure() {
        assert!(parse(SAID, 1 << 10).is_err());
        assert!(
            parse(
                &SAID.replace("requests:        0", "requests:        7"),
                64 << 10
            )
            .is_err()
        );
        let refused = format!("{SAID}Non-2xx responses:      3\n");
        assert!(parse(&refused, 64 << 10).is_err());
        assert!(parse("", 64 << 10).is_err());
    }

    #[test]
    fn goals_are_where_they_are_set() {
        let rates = [100.0, 60.0, 95.0, 20.0];
        let samples = Way::ALL
            .into_iter()
            .zip(rates)
            .flat_map(|(way, rate)| SIZES_KIB.map(|size| ((way, size), vec![rate])))
            .collect();
        let table = table(&samples);
        let small = ["0.950", "—", "—", "4.75", "≥ 5", "**no**", "0.600", "1.58"];
        assert_eq!(table.rows[0][5..], small);
        let large = ["0.950", "≥ 0.9", "yes", "4.75", "—", "—", "0.600", "1.58"];
        assert_eq!(table.rows[3][5..], large);
    }
}
