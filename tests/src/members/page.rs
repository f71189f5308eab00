//! What people and programs see of a cluster: keys, API, events, metrics, the page, the log.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::site::{SOON, Site};
use super::work::{ended_well, free_at_home, hold, running, start_machine};
use super::{Check, Lacks};
use crate::cluster::free_port;
use crate::run::{End, Invocation, Running, start};

/// Longer than any check.
const BOUND: Duration = Duration::from_secs(120);

pub(super) const CHECKS: [(&str, Check); 7] = [
    ("is served, by keys with roles", keys),
    ("changes, and the change is an event", events),
    ("tells what works on which host, and the traffic", live),
    ("shows a machine's console, and types there", console),
    ("has metrics that promtool takes", metrics),
    ("is a page in a browser", browser),
    ("ends at once, and its log stays", end),
];

/// `weft cluster serve` of home.
struct Served {
    running: Running,
    link: String,
}

impl Served {
    fn start(site: &Site<'_>) -> Result<Served> {
        let weft = site.context.weft.to_string_lossy().into_owned();
        let address = format!("127.0.0.1:{}", free_port()?);
        let directory = site.directory.join("serve");
        let words = [&weft[..], "cluster", "serve", "--listen", &address];
        let mut invocation = Invocation::new(&words, &directory).bounded(BOUND);
        invocation.environment = site.environment("home");
        let running = start(&invocation)?;
        let begun = Instant::now();
        loop {
            let said = fs::read_to_string(directory.join("stdout"))?;
            if let Some((link, _)) = said.split_once('\n') {
                let link = link.to_owned();
                return Ok(Served { running, link });
            }
            let why = fs::read_to_string(directory.join("stderr"))?;
            ensure!(begun.elapsed() < SOON, "no link: {why}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn address(&self) -> &str {
        let rest = self.link.trim_start_matches("http://");
        rest.split('/').next().unwrap_or_default()
    }

    fn key(&self) -> &str {
        self.link.split('#').nth(1).unwrap_or_default()
    }

    fn ask(&self, key: &str, method: &str, path: &str) -> Result<(u16, String)> {
        ask(TcpStream::connect(self.address())?, key, method, path, "")
    }

    fn post(&self, path: &str, body: &str) -> Result<(u16, String)> {
        let stream = TcpStream::connect(self.address())?;
        ask(stream, self.key(), "POST", path, body)
    }

    fn end(self) -> Result<()> {
        kill(Pid::from_raw(self.running.pid()), Signal::SIGTERM)?;
        let outcome = self.running.finish()?;
        ensure!(outcome.end == End::Exit(0), "{}", outcome.end);
        Ok(())
    }
}

fn request(key: &str, method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \
         {key}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn ask(
    mut stream: impl Read + Write,
    key: &str,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    stream.write_all(request(key, method, path, body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).context("no status")?.parse()?;
    let body = answer.split_once("\r\n\r\n").context("no head")?.1;
    Ok((status, body.to_owned()))
}

fn keys(site: &mut Site<'_>) -> Result<()> {
    site.init()?;
    site.join("alpha")?;
    site.join("beta")?;
    for host in ["home", "alpha", "beta"] {
        site.lend(host, "1500M")?;
    }
    site.living(&["alpha", "beta", "home"])?;
    let key = site.succeeds("alpha", "cluster access make eyes")?;
    let key = key.trim();
    let again = site.fails("alpha", "cluster access make eyes")?;
    ensure!(again.contains("exists already"), "{again}");
    let listed = site.succeeds("home", "cluster access list")?;
    ensure!(listed.contains("eyes  look"), "{listed}");
    ensure!(!listed.contains(key), "the list has the key: {listed}");
    let served = Served::start(site)?;
    let drain = "/v1/hosts/beta/drain";
    for (key, method, path, wanted) in [
        (key, "GET", "/v1/overview", 200),
        (key, "POST", drain, 403),
        ("weft-key-00", "GET", "/v1/overview", 401),
        ("", "POST", drain, 401),
    ] {
        let (status, said) = served.ask(key, method, path)?;
        ensure!(status == wanted, "{method} {path}: {status}: {said}");
    }
    let socket = site.directory.join("run-home/weft/web.sock");
    let (status, session) = ask(UnixStream::connect(&socket)?, "", "GET", "/v1/session", "")?;
    ensure!(status == 200 && session.contains("\"run\""), "{session}");
    let second = site.fails("home", "cluster serve --listen 127.0.0.1:0")?;
    ensure!(second.contains("another"), "{second}");
    let outside = "cluster serve --listen 0.0.0.0:0 --socket other.sock";
    let refused = site.fails("home", outside)?;
    ensure!(refused.contains("--tls-certificate"), "{refused}");
    site.succeeds("beta", "cluster access end eyes")?;
    let begun = Instant::now();
    while served.ask(key, "GET", "/v1/overview")?.0 != 401 {
        ensure!(begun.elapsed() < SOON, "a key that was ended still works");
        std::thread::sleep(Duration::from_millis(100));
    }
    served.end()
}

/// The state of beta in an event.
fn beta(event: &Value) -> &str {
    let mut hosts = event["hosts"].as_array().into_iter().flatten();
    let beta = hosts.find(|host| host["name"] == "beta");
    beta.and_then(|host| host["state"].as_str())
        .unwrap_or_default()
}

fn events(site: &mut Site<'_>) -> Result<()> {
    let served = Served::start(site)?;
    let mut stream = TcpStream::connect(served.address())?;
    stream.set_read_timeout(Some(SOON))?;
    stream.write_all(request(served.key(), "GET", "/v1/events", "").as_bytes())?;
    let (status, said) = served.ask(served.key(), "POST", "/v1/hosts/beta/drain")?;
    ensure!(status == 200, "{status}: {said}");
    let (mut drained, mut logged) = (false, false);
    let begun = Instant::now();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        // Comments come all the time.
        ensure!(
            begun.elapsed() < SOON,
            "drained: {drained}, logged: {logged}"
        );
        if let Some(data) = line.strip_prefix("data: ") {
            let event: Value = serde_json::from_str(data)?;
            drained |= beta(&event) == "drained";
            logged |= data.contains("beta is drained.");
        }
        if drained && logged {
            break;
        }
    }
    ensure!(drained && logged, "drained: {drained}, logged: {logged}");
    let plan: Value = serde_json::from_str(&site.succeeds("alpha", "plan --json")?)?;
    ensure!(beta(&plan) == "drained", "{plan}");
    site.succeeds("alpha", "node uncordon beta")?;
    served.end()
}

/// A program and a machine on two hosts each, as their agents see them.
fn live(site: &mut Site<'_>) -> Result<()> {
    let go = site.directory.join("go-live");
    let program = hold(site, free_at_home(site)? - 150, &go, &["--stretch", "now"])?;
    running(site, 1)?;
    let kernel = site.context.programs.join("typed-guest");
    let kernel = kernel.to_string_lossy();
    start_machine(
        site,
        &format!(
            "vm start --cluster --name web --backend soft --kernel {kernel} --cpus 1 --memory 300M"
        ),
    )?;
    let served = Served::start(site)?;
    let begun = Instant::now();
    loop {
        let (status, text) = served.ask(served.key(), "GET", "/v1/overview")?;
        ensure!(status == 200, "{status}: {text}");
        let start = text.find('{').context("no JSON")?;
        let overview: Value = serde_json::from_str(&text[start..=text.rfind('}').unwrap_or(0)])?;
        let runs = overview["runs"].as_array().context("no runs")?;
        let live = runs.iter().map(|run| &run["live"]);
        let told: Vec<&Value> = live.filter(|live| !live.is_null()).collect();
        let web = runs.iter().find(|run| run["name"] == "web");
        let web = &web.context("the machine")?["live"];
        let parts = web["hosts"].as_array().map_or(0, Vec::len);
        let flows = web["flows"].as_array().cloned().unwrap_or_default();
        let between = flows
            .iter()
            .any(|flow| flow["from"] != flow["to"] && flow["bytes_per_s"].as_f64() > Some(0.0));
        if told.len() == 2 && parts == 2 && between {
            break;
        }
        ensure!(begun.elapsed() < SOON, "{overview}");
        std::thread::sleep(Duration::from_millis(200));
    }
    served.end()?;
    site.succeeds("home", "vm stop --timeout 0 web")?;
    fs::write(&go, "")?;
    ended_well(program)?;
    running(site, 0)
}

/// A console that is open over HTTP.
struct Console {
    lines: std::io::Lines<BufReader<TcpStream>>,
    said: String,
}

impl Console {
    fn open(served: &Served, path: &str) -> Result<Console> {
        let mut stream = TcpStream::connect(served.address())?;
        stream.set_read_timeout(Some(SOON))?;
        stream.write_all(request(served.key(), "GET", path, "").as_bytes())?;
        Ok(Console {
            lines: BufReader::new(stream).lines(),
            said: String::new(),
        })
    }

    /// Reads until the machine has said `text`, or the end; whether it has.
    fn says(&mut self, text: &str) -> Result<bool> {
        let begun = Instant::now();
        let mut event = String::new();
        while !self.said.contains(text) {
            ensure!(begun.elapsed() < SOON, "no {text:?} in {:?}", self.said);
            let Some(line) = self.lines.next() else {
                return Ok(false);
            };
            let line = line?;
            if let Some(kind) = line.strip_prefix("event: ") {
                event = kind.to_owned();
            }
            if let Some(data) = line.strip_prefix("data: ") {
                let data: String = serde_json::from_str(data)?;
                ensure!(event != "closed", "closed: {data}; it said {:?}", self.said);
                let bytes = STANDARD.decode(data)?;
                self.said += &String::from_utf8_lossy(&bytes);
            }
        }
        Ok(true)
    }
}

fn console(site: &mut Site<'_>) -> Result<()> {
    let kernel = site.context.programs.join("typed-guest");
    let kernel = kernel.to_string_lossy();
    let start = "vm start --cluster --name web --backend soft --cpus 1 --memory 64M --kernel";
    start_machine(site, &format!("{start} {kernel}"))?;
    let key = site.succeeds("home", "cluster access make eyes-only")?;
    let served = Served::start(site)?;
    let path = "/v1/work/web/console";
    for (key, method, path, wanted) in [
        (key.trim(), "GET", path, 403),
        (key.trim(), "POST", path, 403),
        (served.key(), "POST", path, 400),
        (served.key(), "GET", "/v1/work/db/console", 404),
    ] {
        let (status, said) = served.ask(key, method, path)?;
        ensure!(status == wanted, "{method} {path}: {status}: {said}");
    }
    let mut first = Console::open(&served, path)?;
    ensure!(first.says("ready")?, "the machine says nothing");
    // The guest takes some other letters as commands.
    for typed in ["one ", "same ", "line"] {
        let body = serde_json::json!({ "typed": typed }).to_string();
        let (status, said) = served.post(path, &body)?;
        ensure!(status == 200, "{status}: {said}");
    }
    ensure!(first.says("one same line")?, "{:?}", first.said);
    // A page that comes later sees what was said before, and both see what comes.
    let mut second = Console::open(&served, path)?;
    ensure!(second.says("one same line")?, "{:?}", second.said);
    let taken = site.succeeds("home", "vm console web")?;
    ensure!(taken.contains("another client is attached"), "{taken}");
    if site.context.tool("chromium").is_some() {
        browse(site, &served, &["--console", "web", "--types", "Weaves"])?;
        ensure!(first.says("Weaves")?, "{:?}", first.said);
    }
    drop(second);
    site.succeeds("home", "vm stop --timeout 0 web")?;
    let ended = first.says("what it never says");
    let why = ended.err().context("the stream goes on")?.to_string();
    ensure!(why.starts_with("closed: "), "{why}");
    site.succeeds("home", "cluster access end eyes-only")?;
    served.end()?;
    running(site, 0)
}

fn browse(site: &Site<'_>, served: &Served, more: &[&str]) -> Result<()> {
    let script: PathBuf = site.context.sources.join("../page/browse.py");
    let script = script.to_string_lossy();
    let mut words = vec!["python3", &script, &served.link];
    words.extend(more);
    let outcome = site.invoke("home", &words)?;
    let said = outcome.stderr.trim();
    ensure!(outcome.end == End::Exit(0), "{}: {said}", outcome.end);
    Ok(())
}

fn metrics(site: &mut Site<'_>) -> Result<()> {
    let promtool = site.context.tool("promtool");
    let promtool = promtool.ok_or(Lacks("promtool (Debian package prometheus)"))?;
    let served = Served::start(site)?;
    let (status, text) = served.ask(served.key(), "GET", "/metrics")?;
    ensure!(status == 200, "{status}: {text}");
    // The answer comes in one piece: nothing is around it.
    let begin = text.find("# HELP").context("no help")?;
    let mut check = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = check.stdin.take().context("a pipe")?;
    input.write_all(&text.as_bytes()[begin..])?;
    drop(input);
    let checked = check.wait_with_output()?;
    let said = String::from_utf8_lossy(&checked.stderr).into_owned()
        + &String::from_utf8_lossy(&checked.stdout);
    ensure!(checked.status.success(), "{said}");
    served.end()
}

fn browser(site: &mut Site<'_>) -> Result<()> {
    if site.context.tool("chromium").is_none() {
        return Err(Lacks("chromium").into());
    }
    let served = Served::start(site)?;
    browse(site, &served, &["--width", "1280", "--host", "beta"])?;
    browse(site, &served, &["--width", "420", "--dark"])?;
    served.end()
}

fn end(site: &mut Site<'_>) -> Result<()> {
    let socket = site.directory.join("run-home/weft/web.sock");
    ensure!(!socket.exists(), "the socket is still there");
    let log = site.succeeds("beta", "cluster log")?;
    ensure!(log.contains("beta is drained."), "{log}");
    let numbers: Vec<Value> = site
        .succeeds("beta", "cluster log --json")?
        .lines()
        .map(|line| Ok(serde_json::from_str::<Value>(line)?["number"].clone()))
        .collect::<Result<_>>()?;
    let expected: Vec<Value> = (1..=numbers.len()).map(Value::from).collect();
    ensure!(numbers == expected, "{numbers:?}");
    Ok(())
}
