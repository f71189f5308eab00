//! A server over a cluster in memory, asked over real sockets.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_cluster::{Cluster, Cordon, HostRecord, HostReport, LogKind, Role, Secret};
use weft_store::{
    Change, Committed, Condition, Embedded, Entry, LeaseId, Revision, Snapshot, Store, StoreError,
    Update,
};
use weft_web::{CONNECTIONS_MAX, Gateway, Listen, OPENAPI, Server, ServerError};

/// Whatever is waited for comes within this.
const BOUND: Duration = Duration::from_secs(20);

fn cluster() -> Cluster {
    cluster_in(Arc::new(Embedded::in_memory().unwrap()))
}

fn cluster_in(store: Arc<dyn Store>) -> Cluster {
    let record = HostRecord {
        name: "alpha".into(),
        key: "weft-key-alpha".into(),
        address: "alpha:7117".into(),
        cores: 4,
        memory_bytes: 8 << 30,
        features: Vec::new(),
        version: "1".into(),
        number: 0,
    };
    let cluster = Cluster::init(store, "fragments", &record).unwrap();
    let report = HostReport {
        lends_bytes: 4 << 30,
        ..HostReport::default()
    };
    let lease = cluster.lease().unwrap();
    cluster
        .report("alpha", "weft-key-alpha", &report, lease)
        .unwrap();
    // Nobody renews it: the tests are over before it ends, or do not look at it.
    cluster
}

/// Any port of the loopback, without TLS.
fn loopback() -> Listen {
    Listen {
        address: "127.0.0.1:0".parse().unwrap(),
        tls: None,
    }
}

fn scratch() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("weft-web-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// A server that runs until this is dropped.
struct Site {
    cluster: Cluster,
    address: SocketAddr,
    socket: PathBuf,
    /// Of the link.
    key: String,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Site {
    fn start(tls: Option<(PathBuf, PathBuf)>) -> Site {
        Site::over(cluster(), tls)
    }

    fn over(cluster: Cluster, tls: Option<(PathBuf, PathBuf)>) -> Site {
        let socket = scratch().join("web.sock");
        let address = "127.0.0.1:0".parse().unwrap();
        let server = Server::bind(cluster.clone(), &socket, &Listen { address, tls }).unwrap();
        let link = server.link().unwrap();
        let (address, key) = link.split_once("/#").unwrap();
        let address = address.split_once("://").unwrap().1.parse().unwrap();
        let key = key.to_owned();
        let (end, ended) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            server
                .run(async {
                    let _ = ended.await;
                })
                .unwrap();
        });
        Site {
            cluster,
            address,
            socket,
            key,
            end: Some(end),
            thread: Some(thread),
        }
    }

    fn key(&self, name: &str, role: Role) -> Secret {
        let life = Duration::from_secs(60);
        self.cluster.make_access(name, role, life).unwrap()
    }

    fn ask(&self, key: Option<&str>, method: &str, path: &str, body: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.address).unwrap();
        ask(stream, key, method, path, body)
    }

    /// What a key gets at last: the server sees a new key within its period.
    fn becomes(&self, key: &str, wanted: u16) {
        let begun = Instant::now();
        loop {
            let (status, text) = self.ask(Some(key), "GET", "/v1/session", "");
            if status == wanted {
                return;
            }
            assert!(begun.elapsed() < BOUND, "{status}: {text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
            assert!(!self.socket.exists(), "the socket goes with the server");
        }
    }
}

fn head(key: Option<&str>, method: &str, path: &str, body: &str) -> String {
    let key = key.map_or_else(String::new, |key| {
        format!("Authorization: Bearer {key}\r\n")
    });
    format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{key}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn ask(
    mut stream: impl Read + Write,
    key: Option<&str>,
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String) {
    stream
        .write_all(head(key, method, path, body).as_bytes())
        .unwrap();
    let mut answer = Vec::new();
    // TLS may end without its own word.
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let status = answer.split(' ').nth(1).expect("a status").parse().unwrap();
    let body = answer.split_once("\r\n\r\n").expect("a head").1;
    (status, body.to_owned())
}

/// Every method on every path, by each kind of client: what a key may do is what the document
/// says, and nothing else changes the cluster.
#[test]
fn roles_hold_whatever_is_asked() {
    let site = Site::start(None);
    let (look, run) = (site.key("eyes", Role::Look), site.key("hands", Role::Run));
    let moves = site.key("mover", Role::Use);
    site.becomes(&look.to_string(), 200);
    site.becomes(&moves.to_string(), 200);
    site.becomes(&run.to_string(), 200);
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let clients = [
        (None, None),
        (Some("weft-key-0000".to_owned()), None),
        (Some("nonsense".to_owned()), None),
        (Some(String::new()), None),
        (Some(look.to_string()), Some("look")),
        (Some(moves.to_string()), Some("use")),
        (Some(run.to_string()), Some("run")),
        (Some(site.key.clone()), Some("run")),
    ];
    for (path, operations) in document["paths"].as_object().unwrap() {
        // A stream does not end; it has a test of its own.
        if path == "/v1/events" {
            continue;
        }
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let operation = &operations[method.to_lowercase()];
            let asked = path.replace("{name}", "nobody");
            for (key, role) in &clients {
                let (status, text) = site.ask(key.as_deref(), method, &asked, "{}");
                let needed = operation["x-weft-role"].as_str();
                let expected: &[u16] = match (operation.is_null(), needed, *role) {
                    (true, ..) => &[405],
                    (false, None, _) => &[200],
                    (false, Some(_), None) => &[401],
                    (false, Some("run"), Some("look" | "use")) => &[403],
                    (false, Some("use"), Some("look")) => &[403],
                    // There is no such host or work, and the body is not what it takes.
                    (false, Some("run" | "use"), _) => &[404, 400],
                    _ => &[200],
                };
                let what = format!("{method} {path} by {role:?}: {status} {text}");
                assert!(expected.contains(&status), "{what}");
                if status >= 400 {
                    let error: Value = serde_json::from_str(&text).unwrap();
                    assert!(error["error"]["message"].is_string(), "{what}");
                }
            }
        }
    }
    let cordons = |cluster: &Cluster| cluster.members().unwrap()[0].cordon;
    assert_eq!(cordons(&site.cluster), Cordon::default());
    assert!(!site.cluster.hands_off().unwrap());
}

#[test]
fn what_may_be_changed_is_changed() {
    let site = Site::start(None);
    let post = |path: &str| site.ask(Some(&site.key), "POST", path, "").0;
    let cordon = || site.cluster.members().unwrap()[0].cordon;
    assert_eq!(post("/v1/hosts/alpha/drain"), 200);
    assert!(cordon().draining);
    assert_eq!(post("/v1/hosts/alpha/cordon"), 200);
    assert!(cordon().cordoned && !cordon().draining);
    let evacuate = |body: &str| {
        let path = "/v1/hosts/alpha/evacuate";
        site.ask(Some(&site.key), "POST", path, body).0
    };
    let trouble = || site.cluster.members().unwrap()[0].said_to_fail.clone();
    assert_eq!(evacuate("{\"why\": \"its fan stands still.\"}"), 200);
    assert_eq!(trouble().unwrap(), "its fan stands still");
    let long = format!("{{\"why\": \"{}\"}}", "x".repeat(201));
    for wrong in ["", "{}", "{\"why\": \" \"}", "{\"why\": \"a\\nb\"}", &long] {
        assert_eq!(evacuate(wrong), 400, "{wrong}");
    }
    assert_eq!(post("/v1/hosts/alpha/uncordon"), 200);
    assert_eq!(cordon(), Cordon::default());
    assert_eq!(trouble(), None);
    let wish = |body: &str| {
        let path = "/v1/work/nothing/move";
        site.ask(Some(&site.key), "POST", path, body).0
    };
    assert_eq!(wish("{\"to\": \"alpha\"}"), 404);
    assert_eq!(wish("{\"to\": \"alpha\", \"x\": 1}"), 400);
    let put = |body: &str| site.ask(Some(&site.key), "PUT", "/v1/hands-off", body).0;
    assert_eq!(put("{\"hands_off\": true}"), 200);
    assert!(site.cluster.hands_off().unwrap());
    for wrong in [
        "",
        "[]",
        "{\"hands_off\": 1}",
        "{\"hands_off\": false, \"x\": 1}",
    ] {
        assert_eq!(put(wrong), 400, "{wrong}");
    }
    let choose = |body: &str| site.ask(Some(&site.key), "PUT", "/v1/policy", body).0;
    assert_eq!(choose("{\"policy\": \"least-loaded\"}"), 200);
    for wrong in ["", "{}", "{\"policy\": \"worst-fit\"}"] {
        assert_eq!(choose(wrong), 400, "{wrong}");
    }
    assert_eq!(site.cluster.policy().unwrap().unwrap(), "least-loaded");
    assert_eq!(put(&" ".repeat(5000)), 413);
    assert!(site.cluster.hands_off().unwrap());
}

#[test]
fn a_key_that_was_ended_is_of_no_use() {
    let site = Site::start(None);
    let key = site.key("eyes", Role::Look).to_string();
    site.becomes(&key, 200);
    let mut events = events(&site, &key);
    assert_eq!(next(&mut events).0, "overview");
    site.cluster.end_access("eyes").unwrap();
    site.becomes(&key, 401);
    // The stream ends, too.
    let begun = Instant::now();
    let mut line = String::new();
    while events.read_line(&mut line).unwrap() > 0 {
        assert!(begun.elapsed() < BOUND, "the stream goes on");
        line.clear();
    }
}

fn events(site: &Site, key: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(site.address).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let request = head(Some(key), "GET", "/v1/events", "");
    stream.write_all(request.as_bytes()).unwrap();
    BufReader::new(stream)
}

/// The next event: its name and its data.
fn next(events: &mut BufReader<TcpStream>) -> (String, Value) {
    let (mut kind, begun) = (String::new(), Instant::now());
    loop {
        let mut line = String::new();
        // Comments come all the time.
        assert!(begun.elapsed() < 2 * BOUND, "no event");
        assert!(events.read_line(&mut line).unwrap() > 0, "the stream ended");
        if let Some(name) = line.strip_prefix("event: ") {
            kind = name.trim().to_owned();
        } else if let Some(data) = line.strip_prefix("data: ") {
            return (kind, serde_json::from_str(data).unwrap());
        }
    }
}

#[test]
fn changes_come_as_events() {
    let site = Site::start(None);
    let mut events = events(&site, &site.key);
    let (kind, first) = next(&mut events);
    assert_eq!(
        (&kind[..], first["cluster"].as_str()),
        ("overview", Some("fragments"))
    );
    assert_eq!(first["hosts"][0]["state"], "lends");
    let cordon = Cordon {
        cordoned: true,
        draining: false,
    };
    site.cluster.cordon("alpha", cordon).unwrap();
    let (kind, second) = next(&mut events);
    assert_eq!(kind, "overview");
    assert_eq!(second["hosts"][0]["state"], "cordoned");
    let lease = site.cluster.lease().unwrap();
    let term = site.cluster.campaign("alpha", lease).unwrap().unwrap();
    for what in ["one", "two"] {
        term.note(LogKind::Host, what.into()).unwrap();
    }
    let mut records = Vec::new();
    while records.len() < 2 {
        let (kind, value) = next(&mut events);
        if kind == "log" {
            records.extend(value.as_array().unwrap().clone());
        }
    }
    assert_eq!(
        (&records[0]["what"], &records[1]["what"]),
        (&"one".into(), &"two".into())
    );
    let (_, log) = site.ask(Some(&site.key), "GET", "/v1/log", "");
    assert_eq!(
        serde_json::from_str::<Value>(&log).unwrap(),
        Value::from(records)
    );
}

#[test]
fn the_own_user_needs_no_key_at_the_socket() {
    let site = Site::start(None);
    let at_socket = |method: &str, path: &str| {
        let stream = UnixStream::connect(&site.socket).unwrap();
        ask(stream, None, method, path, "")
    };
    let (status, text) = at_socket("GET", "/v1/session");
    assert_eq!(status, 200);
    let session: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(session["role"], "run");
    assert_eq!(at_socket("POST", "/v1/hosts/alpha/drain").0, 200);
    // A file that is in the way is the user's.
    let file = scratch().join("notes");
    std::fs::write(&file, "mine").unwrap();
    let refused = Server::bind(cluster(), &file, &loopback());
    assert!(matches!(refused, Err(ServerError::Listen(..))));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    // Another server would take its clients.
    let second = Server::bind(cluster(), &site.socket, &loopback());
    assert!(matches!(second, Err(ServerError::Served(_))));
}

#[test]
fn metrics_have_a_type_and_a_help_each() {
    let site = Site::start(None);
    let (status, text) = site.ask(Some(&site.key), "GET", "/metrics", "");
    assert_eq!(status, 200);
    for line in [
        "weft_host_up{host=\"alpha\"} 1.0",
        "weft_host_cores{host=\"alpha\"} 4.0",
        "weft_work_waiting{kind=\"machine\"} 0.0",
        "weft_cluster_has_leader 0.0",
    ] {
        assert!(
            text.lines().any(|has| has == line),
            "{line} is not in {text}"
        );
    }
    assert!(text.ends_with("# EOF\n"));
    let (mut typed, mut helped) = (0, 0);
    for line in text.lines() {
        typed += u32::from(line.starts_with("# TYPE "));
        helped += u32::from(line.starts_with("# HELP "));
    }
    assert_eq!(typed, helped);
    assert!(typed > 10);
}

/// Silent clients take places for a bounded time only; then others are served.
#[test]
fn silent_clients_keep_nobody_out() {
    let site = Site::start(None);
    let silent: Vec<TcpStream> = (0..CONNECTIONS_MAX)
        .map(|_| TcpStream::connect(site.address).unwrap())
        .collect();
    let stream = TcpStream::connect(site.address).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let (status, _) = ask(stream, Some(&site.key), "GET", "/v1/session", "");
    assert_eq!(status, 200);
    drop(silent);
}

/// What was sent waits for a client that reads nothing, and then its connection ends. Without a
/// key one answer ends it.
#[test]
fn clients_that_read_nothing_lose_their_connection() {
    let site = Site::start(None);
    for (path, key) in [
        ("/v1/openapi.json", None),
        ("/v1/overview", Some(&site.key)),
    ] {
        let one = head(key.map(|key| &key[..]), "GET", path, "");
        let asks = one.replace("Connection: close\r\n", "").repeat(100);
        let mut stream = connect_deaf(site.address);
        let begun = Instant::now();
        loop {
            match stream.write(asks.as_bytes()) {
                Ok(_) => {}
                // The server takes no more, since nothing is read of what it sends.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(_) => break,
            }
            assert!(begun.elapsed() < 2 * BOUND, "{path}: it lasts");
        }
    }
}

/// A connection with room for a few answers only.
fn connect_deaf(address: SocketAddr) -> TcpStream {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt,
    };
    use std::os::fd::AsRawFd;
    let family = AddressFamily::Inet;
    let deaf = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&deaf, sockopt::RcvBuf, &4096).unwrap();
    connect(deaf.as_raw_fd(), &SockaddrStorage::from(address)).unwrap();
    let stream = TcpStream::from(deaf);
    stream.set_nonblocking(true).unwrap();
    stream
}

/// A store that stands still, as a cut network makes it.
struct Silent {
    store: Embedded,
    is_silent: AtomicBool,
}

impl Silent {
    fn answer<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        match self.is_silent.load(Ordering::Relaxed) {
            false => answer,
            true => Err(StoreError::Unreachable {
                tried: "etcd://secret-host:2379".into(),
                reason: "cut".into(),
            }),
        }
    }
}

impl Store for Silent {
    fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.answer(self.store.read(prefix))
    }
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.answer(self.store.get(key))
    }
    fn commit(
        &self,
        conditions: &[Condition],
        changes: &[Change],
    ) -> Result<Committed, StoreError> {
        self.answer(self.store.commit(conditions, changes))
    }
    fn grant(&self, time: Duration) -> Result<LeaseId, StoreError> {
        self.answer(self.store.grant(time))
    }
    fn renew(&self, lease: LeaseId) -> Result<Duration, StoreError> {
        self.answer(self.store.renew(lease))
    }
    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.answer(self.store.revoke(lease))
    }
    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        wait: Duration,
    ) -> Result<Vec<Update>, StoreError> {
        self.answer(self.store.watch(prefix, after, wait))
    }
}

#[test]
fn a_store_that_stands_still_is_told_and_comes_back() {
    let store = Arc::new(Silent {
        store: Embedded::in_memory().unwrap(),
        is_silent: AtomicBool::new(false),
    });
    let site = Site::over(cluster_in(store.clone()), None);
    let mut events = events(&site, &site.key);
    assert_eq!(next(&mut events).0, "overview");
    store.is_silent.store(true, Ordering::Relaxed);
    let (kind, why) = next(&mut events);
    assert_eq!(kind, "trouble");
    assert!(why.as_str().unwrap().contains("cut"), "{why}");
    // Until what is known is too old.
    let begun = Instant::now();
    loop {
        let (status, text) = site.ask(Some(&site.key), "GET", "/v1/overview", "");
        if status == 503 {
            assert!(text.contains("secret-host"), "{text}");
            break;
        }
        assert!(begun.elapsed() < 2 * BOUND, "{status}");
    }
    // A client without a key learns nothing of the store.
    let (status, text) = site.ask(Some("weft-key-00"), "GET", "/v1/overview", "");
    assert_eq!(status, 503);
    assert!(!text.contains("secret-host"), "{text}");
    store.is_silent.store(false, Ordering::Relaxed);
    loop {
        match next(&mut events) {
            (kind, _) if kind == "overview" => break,
            (kind, _) => assert_eq!(kind, "trouble"),
        }
    }
    assert_eq!(site.ask(Some(&site.key), "GET", "/v1/overview", "").0, 200);
}

/// What the document says that an answer has, it has.
#[test]
fn answers_have_the_fields_of_the_document() {
    fn missing(schema: &Value, value: &Value, all: &Value, at: &str) -> Vec<String> {
        let name = schema["$ref"]
            .as_str()
            .or(schema["allOf"][0]["$ref"].as_str());
        if let Some(name) = name {
            let name = name.rsplit('/').next().unwrap();
            return match value.is_null() {
                true => Vec::new(),
                false => missing(&all[name], value, all, at),
            };
        }
        let mut lacks = Vec::new();
        for field in schema["required"].as_array().into_iter().flatten() {
            let field = field.as_str().unwrap();
            match value.get(field) {
                None => lacks.push(format!("{at}.{field}")),
                Some(inner) => {
                    let schema = &schema["properties"][field];
                    lacks.extend(missing(schema, inner, all, &format!("{at}.{field}")));
                }
            }
        }
        for inner in value.as_array().into_iter().flatten() {
            lacks.extend(missing(&schema["items"], inner, all, at));
        }
        lacks
    }
    let site = Site::start(None);
    let lease = site.cluster.lease().unwrap();
    let term = site.cluster.campaign("alpha", lease).unwrap().unwrap();
    term.note(LogKind::Host, "one".into()).unwrap();
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let all = &document["components"]["schemas"];
    for path in ["/v1/session", "/v1/overview", "/v1/log"] {
        let begun = Instant::now();
        let value = loop {
            let (status, text) = site.ask(Some(&site.key), "GET", path, "");
            assert_eq!(status, 200);
            let value: Value = serde_json::from_str(&text).unwrap();
            // The record may be newer than what was read last.
            if value != serde_json::json!([]) || begun.elapsed() > BOUND {
                break value;
            }
        };
        let answer = &document["paths"][path]["get"]["responses"]["200"];
        let schema = &answer["content"]["application/json"]["schema"];
        assert_eq!(missing(schema, &value, all, path), [""; 0]);
        let has_items = value.as_array().is_none_or(|items| !items.is_empty());
        assert!(has_items, "{path} shows nothing");
    }
}

#[test]
fn damaged_requests_end_their_connection_alone() {
    let site = Site::start(None);
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(20_000));
    for garbage in ["\0\0\0\0", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", &long] {
        let mut stream = TcpStream::connect(site.address).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        // It may be refused while it is sent.
        let _ = stream.write_all(garbage.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{garbage:?}");
    }
    assert_eq!(site.ask(Some(&site.key), "GET", "/v1/session", "").0, 200);
}

#[test]
fn without_a_certificate_only_the_loopback_listens() {
    let listen = Listen {
        address: "192.0.2.1:0".parse().unwrap(),
        tls: None,
    };
    let refused = Server::bind(cluster(), &scratch().join("web.sock"), &listen);
    assert!(matches!(refused, Err(ServerError::NoTls(_))));
}

#[test]
fn https_is_served_with_a_certificate() {
    let folder = scratch();
    let Some((certificate, key)) = certificate(&folder) else {
        weft_test_support::skipped(&"HTTPS: openssl is not installed");
        return;
    };
    let missing = folder.join("missing");
    for (certificate, key) in [(&missing, &key), (&certificate, &missing), (&key, &key)] {
        let listen = Listen {
            address: "127.0.0.1:0".parse().unwrap(),
            tls: Some((certificate.clone(), key.clone())),
        };
        let refused = Server::bind(cluster(), &folder.join("other.sock"), &listen);
        assert!(matches!(
            refused,
            Err(ServerError::Pem(..) | ServerError::Tls(_))
        ));
    }
    let site = Site::start(Some((certificate.clone(), key)));
    let mut roots = rustls::RootCertStore::empty();
    let pem =
        <rustls::pki_types::CertificateDer<'_> as rustls::pki_types::pem::PemObject>::from_pem_file(
            &certificate,
        );
    roots.add(pem.unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "127.0.0.1".try_into().unwrap();
    let client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let stream = TcpStream::connect(site.address).unwrap();
    let stream = rustls::StreamOwned::new(client, stream);
    assert_eq!(
        ask(stream, Some(&site.key), "GET", "/v1/session", "").0,
        200
    );
    // Without TLS there is no answer at all.
    let mut stream = TcpStream::connect(site.address).unwrap();
    let request = head(Some(&site.key), "GET", "/v1/session", "");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

/// A certificate of the loopback, signed by itself, and its key.
fn certificate(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem \
                 -out certificate.pem -days 30 -subj /CN=weft-test -addext \
                 subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE";
    let made = std::process::Command::new("openssl")
        .args(words.split_whitespace())
        .current_dir(folder)
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    Some((folder.join("certificate.pem"), folder.join("key.pem")))
}

/// A page of any site can send requests to the loopback by its visitor's browser: the store takes
/// none of these.
#[test]
fn a_store_takes_nothing_of_a_browser() {
    let store = Arc::new(Embedded::in_memory().unwrap());
    let gateway = Gateway::bind(store.clone(), loopback().address, None).unwrap();
    let address = gateway.address().unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        gateway
            .run(async {
                let _ = ended.await;
            })
            .unwrap();
    });
    // The key "k" with the value "v".
    let body = r#"{"success": [{"request_put": {"key": "aw==", "value": "dg=="}}]}"#;
    let put = |headers: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        let request = format!(
            "POST /v3/kv/txn HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    let json = "Content-Type: application/json\r\n";
    assert_eq!(put("Content-Type: text/plain\r\n"), "403");
    assert_eq!(put(""), "403");
    assert_eq!(
        put(&format!("{json}Origin: http://site.example\r\n")),
        "403"
    );
    assert_eq!(store.get("k").unwrap(), None);
    assert_eq!(put(json), "200");
    assert_eq!(store.get("k").unwrap().unwrap().value, b"v");
    drop(end);
    thread.join().unwrap();
}
