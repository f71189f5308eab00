//! The devices of `weft vm run` as Linux sees them: disks, networks, the virtio
//! console, random numbers; and a running guest that is paused, resumed and
//! stopped. On the software vCPU, with the small kernel and busybox.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::boot::{Boot, Disk, Images, Monitor, Net, SMALL, USER_SPACE};
use crate::cluster::free_port;
use crate::context::Context;
use crate::guest::{Ended, Guest};
use crate::namespace::{self, TapHost};
use crate::report::{Report, Verdict};
use crate::web::fetch;

/// The bound of everything that a guest does.
const BOUND: Duration = Duration::from_secs(60);
/// `weft vm stop` ends a machine after 10 s.
const STOP: Duration = Duration::from_secs(15);

/// What a check needs beyond the images.
#[derive(Clone, Copy)]
enum Need {
    Tool(&'static str),
    Tap,
}

/// A check; its text is a note.
struct Check {
    name: &'static str,
    needs: &'static [Need],
    run: fn(&Place) -> Result<String>,
}

const fn check(
    name: &'static str,
    needs: &'static [Need],
    run: fn(&Place) -> Result<String>,
) -> Check {
    Check { name, needs, run }
}

const CHECKS: [Check; 13] = [
    check("a disk that may only be read", &[], read_only),
    check("two disks", &[], two_disks),
    check("a disk in use by another machine", &[], in_use),
    check("files through a disk", FILE_SYSTEM, |place| {
        files(place, false)
    }),
    check("files through a direct disk", FILE_SYSTEM, |place| {
        files(place, true)
    }),
    check("discard gives space back", FILE_SYSTEM, discard),
    check(
        "user network, out",
        &[Need::Tool("passt"), Need::Tool("python3")],
        user_out,
    ),
    check("user network, in", &[Need::Tool("passt")], user_in),
    check("tap", &[Need::Tap, Need::Tool("python3")], tap),
    check("virtio console", &[], virtio_console),
    check("random numbers", &[], random_numbers),
    check("list, pause, resume", &[], paused),
    check("stop", &[], stopped),
];
const FILE_SYSTEM: &[Need] = &[
    Need::Tool("mke2fs"),
    Need::Tool("debugfs"),
    Need::Tool("e2fsck"),
];

/// What a check has.
struct Place<'a> {
    context: &'a Context,
    images: &'a Images,
    /// Its files.
    directory: PathBuf,
}

/// Runs the selected checks.
pub fn run_devices(
    context: &Context,
    images: &Images,
    wanted: &dyn Fn(&str) -> bool,
    report: &Report,
) {
    for check in &CHECKS {
        let name = format!("devices: {}", check.name);
        if !wanted(&name) {
            continue;
        }
        let started = Instant::now();
        let lacks = || check.needs.iter().find_map(|need| missing(context, *need));
        let verdict = match images.missing(&SMALL).or_else(lacks) {
            Some(why) => Verdict::Skipped(why),
            None => run_check(context, images, check)
                .map_or_else(|e| Verdict::Failed(vec![format!("{e:#}")]), Verdict::Passed),
        };
        report.add(&name, started.elapsed(), verdict);
    }
}

fn run_check(context: &Context, images: &Images, check: &Check) -> Result<String> {
    let place = Place {
        context,
        images,
        directory: context.directory(&format!("devices-{}", check.name))?,
    };
    (check.run)(&place)
}

fn missing(context: &Context, need: Need) -> Option<String> {
    match need {
        Need::Tool(name) if context.tool(name).is_none() => {
            Some(format!("`{name}` is not installed (`make setup`)"))
        }
        Need::Tap if !Path::new("/dev/net/tun").exists() => Some("needs /dev/net/tun".to_string()),
        Need::Tap => namespace::missing(),
        Need::Tool(_) => None,
    }
}

impl Place<'_> {
    fn boot(&self, script: &str) -> Result<Boot> {
        let mut boot = self.images.small(&self.context.weft)?.running(script);
        boot.memory_mib = 128;
        boot.bound = BOUND;
        Ok(boot)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A file of bytes that do not repeat.
    fn pattern(&self, name: &str, bytes: usize, seed: u64) -> Result<PathBuf> {
        let mut state = seed | 1;
        let words = (0..bytes / 8).map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        let file = self.file(name);
        fs::write(&file, words.flatten().collect::<Vec<u8>>())?;
        Ok(file)
    }

    /// An empty disk with an ext4 file system; `files` is a folder to put there.
    fn file_system(&self, name: &str, files: Option<&Path>) -> Result<PathBuf> {
        let file = self.file(name);
        fs::File::create(&file)?.set_len(64 << 20)?;
        let mut command = Command::new(self.tool("mke2fs")?);
        command.args(["-q", "-F", "-t", "ext4"]);
        if let Some(files) = files {
            command.arg("-d").arg(files);
        }
        output(command.arg(&file))?;
        Ok(file)
    }

    fn tool(&self, name: &str) -> Result<PathBuf> {
        self.context
            .tool(name)
            .with_context(|| format!("no {name}"))
    }

    /// A command of weft, among machines of this check only.
    fn weft(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.context.weft);
        command.args(words);
        command.env("XDG_RUNTIME_DIR", &self.directory);
        command
    }

    /// A machine that [`Place::weft`] finds as `guest`.
    fn start(&self, mut boot: Boot) -> Result<Guest> {
        boot.options.extend(["--name".into(), "guest".into()]);
        let mut command = boot.command(Monitor::Soft);
        Guest::start(command.env("XDG_RUNTIME_DIR", &self.directory))
    }
}

/// Standard output of a command that must succeed.
fn output(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "{program}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

/// The digest of a file, in hexadecimal.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let text = String::from_utf8(output(Command::new("sha256sum").arg(file))?)?;
    Ok(text.split(' ').next().unwrap_or_default().to_string())
}

/// Fails unless the console has a line with each text.
fn says(ended: &Ended, texts: &[&str]) -> Result<()> {
    for text in texts {
        ensure!(
            ended.line(text).is_some(),
            "the guest does not say `{text}`:\n{}",
            ended.tail(20)
        );
    }
    Ok(())
}

fn await_line(guest: &mut Guest, text: &str) -> Result<()> {
    guest
        .wait_for(text, BOUND)
        .with_context(|| format!("the guest does not say `{text}`"))?;
    Ok(())
}

fn read_only(place: &Place) -> Result<String> {
    let disk = place.pattern("disk", 4 << 20, 1)?;
    let before = sha256(&disk)?;
    let mut boot = place.boot(
        "echo ro $(cat /sys/block/vda/ro); sha256sum /dev/vda; \
         dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=notrunc || echo refused",
    )?;
    boot.disks.push(Disk::new(&disk).read_only());
    let run = boot.run(Monitor::Soft)?;
    says(&run.ended, &["ro 1", &before, "refused"])?;
    ensure!(sha256(&disk)? == before, "the disk changed");
    Ok(String::new())
}

fn two_disks(place: &Place) -> Result<String> {
    let first = place.pattern("first", 1 << 20, 2)?;
    let second = place.pattern("second", 3 << 20, 3)?;
    let before = sha256(&first)?;
    let mut boot = place.boot(
        "cd /sys/block; for d in vda vdb; do echo $d $(cat $d/size) $(cat $d/serial); done; \
         sha256sum /dev/vda /dev/vdb; dd if=/dev/vda of=/dev/vdb bs=64k seek=16 conv=notrunc,fsync",
    )?;
    boot.disks = vec![Disk::new(&first), Disk::new(&second)];
    let digests = [before.as_str(), &sha256(&second)?];
    let run = boot.run(Monitor::Soft)?;
    says(&run.ended, &["vda 2048 first", "vdb 6144 second"])?;
    says(&run.ended, &digests)?;
    ensure!(sha256(&first)? == before, "the first disk changed");
    let (first, second) = (fs::read(&first)?, fs::read(&second)?);
    ensure!(
        second[1 << 20..2 << 20] == first,
        "the copy on the second disk is not the first"
    );
    Ok(String::new())
}

fn in_use(place: &Place) -> Result<String> {
    let disk = place.pattern("disk", 1 << 20, 4)?;
    let mut boot = place.boot("echo up; read word")?;
    boot.disks.push(Disk::new(&disk));
    let mut owner = place.start(boot.clone())?;
    await_line(&mut owner, "up")?;
    for disk in [Disk::new(&disk), Disk::new(&disk).read_only()] {
        boot.disks = vec![disk];
        let ended = boot.start(Monitor::Soft)?.finish(BOUND)?;
        ensure!(
            ended.status.and_then(|status| status.code()) == Some(125)
                && ended.stderr.contains("in use"),
            "{:?}: {}",
            ended.status,
            ended.stderr
        );
    }
    owner.write("end\n")?;
    ensure!(owner.finish(BOUND)?.ended_well());
    // Free again, and readers do not mind each other.
    boot.disks = vec![Disk::new(&disk).read_only()];
    let mut reader = place.start(boot.clone())?;
    await_line(&mut reader, "up")?;
    let ended = boot.running("echo second reader").run(Monitor::Soft)?.ended;
    says(&ended, &["second reader"])?;
    Ok(String::new())
}

/// Host to guest, guest to host, and to a second boot.
fn files(place: &Place, direct: bool) -> Result<String> {
    let folder = place.file("folder");
    fs::create_dir(&folder)?;
    let given = place.pattern("folder/given", 5 << 20, 5)?;
    let disk = place.file_system("disk", Some(&folder))?;
    let mut boot = place.boot(
        "mount -t ext4 /dev/vda /mnt && cd /mnt && sha256sum given && \
         dd if=/dev/urandom of=new bs=64k count=200 && mkdir many && \
         for i in $(seq 300); do echo $i > many/$i; done; rm given; \
         echo made $(sha256sum < new); cd / && umount /mnt && echo done",
    )?;
    boot.script = format!("mkdir -p /mnt; {}", boot.script);
    let attached = Disk::new(&disk);
    boot.disks.push(match direct {
        true => attached.direct(),
        false => attached,
    });
    let run = boot.run(Monitor::Soft)?;
    says(&run.ended, &[&sha256(&given)?, "done"])?;
    let made = run.ended.line("made ").context("no digest")?.text.clone();
    let made = made.split(' ').nth(1).context("no digest")?;
    output(Command::new(place.tool("e2fsck")?).arg("-fn").arg(&disk))?;
    let dumped = place.file("dumped");
    let request = format!("dump new {}", dumped.display());
    let mut debugfs = Command::new(place.tool("debugfs")?);
    output(debugfs.args(["-R", &request]).arg(&disk))?;
    ensure!(
        sha256(&dumped)? == made,
        "the host reads another file than the guest wrote"
    );
    let again = boot.running(
        "mkdir -p /mnt; mount -t ext4 /dev/vda /mnt && sha256sum /mnt/new; \
         echo files $(cat /mnt/many/* | sort -n | uniq | wc -l)",
    );
    says(&again.run(Monitor::Soft)?.ended, &[made, "files 300"])?;
    Ok("12.5 MiB and 300 files".to_string())
}

fn discard(place: &Place) -> Result<String> {
    let disk = place.file_system("disk", None)?;
    let blocks = || Ok::<_, anyhow::Error>(fs::metadata(&disk)?.blocks() / 2);
    let mut boot = place.boot(
        "mkdir -p /mnt; mount -t ext4 /dev/vda /mnt && \
         dd if=/dev/urandom of=/mnt/file bs=1M count=24 conv=fsync && umount /mnt",
    )?;
    boot.disks.push(Disk::new(&disk));
    says(&boot.run(Monitor::Soft)?.ended, &["exit 0"])?;
    let full = blocks()?;
    let trim = boot.running(
        "mkdir -p /mnt; mount -t ext4 /dev/vda /mnt && rm /mnt/file && sync && \
         fstrim -v /mnt && umount /mnt",
    );
    says(&trim.run(Monitor::Soft)?.ended, &["exit 0"])?;
    let left = blocks()?;
    ensure!(
        full > left + (20 << 10),
        "{full} KiB were allocated, {left} KiB are left"
    );
    output(Command::new(place.tool("e2fsck")?).arg("-fn").arg(&disk))?;
    Ok(format!("{full} KiB, then {left} KiB"))
}

/// A web server of the host, which ends with this value.
struct WebServer {
    child: Child,
    port: u16,
    /// Its pipe: closed, it would end a server that writes.
    output: ChildStdout,
}

impl WebServer {
    /// Serves `folder` at `address`, by a program after the words of `prefix`.
    fn start(prefix: &[std::ffi::OsString], address: &str, folder: &Path) -> Result<WebServer> {
        let port = free_port()?;
        let mut words = prefix.to_vec();
        words.extend(["python3", "-u", "-m", "http.server", "--bind", address].map(Into::into));
        words.extend([port.to_string().into(), "-d".into(), folder.into()]);
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut first = [0; 7];
        let output = child.stdout.take().context("a pipe")?;
        let mut server = WebServer {
            child,
            port,
            output,
        };
        let served = server.output.read_exact(&mut first);
        served.context("no web server")?;
        Ok(server)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn user_out(place: &Place) -> Result<String> {
    let folder = place.file("web");
    fs::create_dir(&folder)?;
    let file = place.pattern("web/file", 8 << 20, 6)?;
    let server = WebServer::start(&[], "127.0.0.1", &folder)?;
    let mut boot = place.boot(&format!(
        "ip addr show eth0; wget -q -O /tmp/file http://10.0.2.2:{}/file; sha256sum /tmp/file",
        server.port
    ))?;
    boot.nets.push(Net::User { forwards: vec![] });
    boot.words = "weft.net=dhcp".to_string();
    let run = boot.run(Monitor::Soft)?;
    says(&run.ended, &["10.0.2.15/24", &sha256(&file)?])?;
    Ok("8 MiB".to_string())
}

fn user_in(place: &Place) -> Result<String> {
    let (web, other) = (free_port()?, free_port()?);
    let mut boot = place.boot(
        "mkdir /tmp/web; dd if=/dev/urandom of=/tmp/web/file bs=64k count=32; \
         echo digest $(sha256sum < /tmp/web/file); httpd -p 80 -h /tmp/web; \
         nc -l -p 99 > /tmp/got & echo serving; wait $!; echo got $(cat /tmp/got); read word",
    )?;
    boot.nets.push(Net::User {
        forwards: vec![(web, 80), (other, 99)],
    });
    boot.words = "weft.net=dhcp".to_string();
    let mut guest = place.start(boot)?;
    await_line(&mut guest, "serving")?;
    let body = place.file("body");
    fs::write(&body, fetch(web, BOUND)?)?;
    TcpStream::connect(("127.0.0.1", other))?.write_all(b"a word\n")?;
    await_line(&mut guest, "got a word")?;
    guest.write("end\n")?;
    let ended = guest.finish(BOUND)?;
    ensure!(ended.ended_well(), "{}", ended.stderr);
    says(&ended, &[&format!("digest {}", sha256(&body)?)])?;
    Ok("2 MiB".to_string())
}

fn tap(place: &Place) -> Result<String> {
    let host = TapHost::new()?;
    let folder = place.file("web");
    fs::create_dir(&folder)?;
    let file = place.pattern("web/file", 8 << 20, 7)?;
    let server = WebServer::start(&host.prefix(), TapHost::ADDRESS, &folder)?;
    let address = TapHost::ADDRESS;
    let mut boot = place.boot(&format!(
        "ping -c 3 {address}; ping -c 2 -s 1400 {address}; \
         wget -q -O /tmp/file http://{address}:{}/file; sha256sum /tmp/file",
        server.port
    ))?;
    boot.prefix = host.prefix();
    boot.nets.push(Net::Tap(TapHost::DEVICE.to_string()));
    boot.words = format!("weft.net={}/24", TapHost::GUEST);
    let run = boot.run(Monitor::Soft)?;
    let wanted = ["3 packets received, 0%", "2 packets received, 0%"];
    says(&run.ended, &wanted)?;
    says(&run.ended, &[&sha256(&file)?])?;
    let trip = run.ended.line("round-trip").map(|line| line.text.clone());
    Ok(trip.unwrap_or_default())
}

/// The guest's own console is the virtio one; keys go where output comes from.
fn virtio_console(place: &Place) -> Result<String> {
    let mut boot = place.boot(
        "echo active $(cat /sys/class/tty/console/active); read word; echo heard $word; \
         seq 2000 | sha256sum; seq 2000",
    )?;
    boot.words = "console=hvc0".to_string();
    let mut guest = place.start(boot)?;
    await_line(&mut guest, "active")?;
    guest.write("spoken\n")?;
    let ended = guest.finish(BOUND)?;
    ensure!(ended.ended_well(), "{}", ended.stderr);
    says(&ended, &["hvc0", "heard spoken"])?;
    let numbers = ended.lines.iter().map(|line| &line.text);
    let numbers: Vec<u32> = numbers.filter_map(|text| text.parse().ok()).collect();
    ensure!(
        numbers == (1..=2000).collect::<Vec<_>>(),
        "{} of 2000 lines came",
        numbers.len()
    );
    Ok(String::new())
}

fn random_numbers(place: &Place) -> Result<String> {
    let boot = place.boot(
        "echo from $(cat /sys/class/misc/hw_random/rng_current); \
         for i in 1 2; do echo random $(head -c 4096 /dev/hwrng | tee /tmp/$i | sha256sum); done; \
         echo bytes $(cat /tmp/1 /tmp/2 | wc -c); \
         echo packed $(cat /tmp/1 /tmp/2 | gzip | wc -c)",
    )?;
    let ended = boot.run(Monitor::Soft)?.ended;
    says(&ended, &["from virtio_rng", "bytes 8192"])?;
    let values = |word: &str| {
        let lines = ended.lines.iter();
        let values = lines.filter_map(|line| line.text.strip_prefix(word).map(str::to_string));
        values.collect::<Vec<_>>()
    };
    let digests = values("random ");
    ensure!(
        digests.len() == 2 && digests[0] != digests[1],
        "{digests:?}"
    );
    let packed: usize = values("packed ").concat().trim().parse()?;
    ensure!(packed >= 8192, "8192 bytes compress to {packed}");
    Ok(String::new())
}

const TICKS: &str = "i=0; while true; do i=$((i+1)); \
                     echo tick $i at $(cut -d. -f1 /proc/uptime); usleep 50000; done";

/// How many ticks have come so far: `wait_for` looks until nothing comes.
fn ticks(guest: &mut Guest, quiet: Duration) -> usize {
    let _ = guest.wait_for("no such line", quiet);
    let lines = guest.lines().iter();
    lines.filter(|line| line.text.starts_with("tick")).count()
}

fn paused(place: &Place) -> Result<String> {
    let mut guest = place.start(place.boot(TICKS)?)?;
    await_line(&mut guest, "tick 5 ")?;
    let list = String::from_utf8(output(&mut place.weft(&["vm", "list"]))?)?;
    ensure!(
        list.contains("guest") && list.contains("running"),
        "weft vm list: {list}"
    );
    output(&mut place.weft(&["vm", "pause", "guest"]))?;
    let list = String::from_utf8(output(&mut place.weft(&["vm", "list"]))?)?;
    ensure!(list.contains("paused"), "weft vm list: {list}");
    let before = ticks(&mut guest, Duration::from_millis(200));
    let after = ticks(&mut guest, Duration::from_secs(3));
    ensure!(
        before == after,
        "a paused guest ticks: {before}, then {after}"
    );
    output(&mut place.weft(&["vm", "resume", "guest"]))?;
    await_line(&mut guest, &format!("tick {} ", after + 20))?;
    let last = guest.lines().iter().rev();
    let seconds = last
        .filter_map(|line| line.text.rsplit_once(" at ")?.1.parse::<u64>().ok())
        .next()
        .context("no uptime")?;
    guest.kill()?;
    Ok(format!("{after} ticks before, {seconds} s of guest time"))
}

fn stopped(place: &Place) -> Result<String> {
    let mut guest = place.start(place.boot(TICKS)?)?;
    await_line(&mut guest, USER_SPACE)?;
    await_line(&mut guest, "tick 3 ")?;
    let started = Instant::now();
    output(&mut place.weft(&["vm", "stop", "guest"]))?;
    let took = started.elapsed();
    let ended = guest.finish(STOP)?;
    ensure!(took < STOP, "it took {took:?}");
    let code = ended.status.and_then(|status| status.code());
    if code != Some(0) || ended.line("power button").is_none() {
        bail!("exit {code:?}: {}\n{}", ended.stderr, ended.tail(6));
    }
    Ok(format!("{:.1} s", took.as_secs_f64()))
}
