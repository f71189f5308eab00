//! The API over its socket, with a fake machine. Needs no privilege.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_api::client::{Client, ClientError};
use weft_api::{
    BackEndView, BalloonView, CONNECTIONS_MAX, ChangeView, ConsoleView, Control, Counters, Failure,
    Faults, LocationView, OPENAPI, Pages, REQUEST_BYTES_MAX, SaveBody, SaveFilesBody, Saved,
    Server, State, VmView,
};
use weft_checkpoint::{Identity, Written};
use weft_coherent_memory::{
    FaultKind, FaultPurpose, FaultRecord, PageCount, SliceFaults, SlicePages,
};
use weft_machine::membership::{NewNode, Released};
use weft_machine::migration::{Destination, Migration};
use weft_machine::{
    Configuration, Disk, Forward, Network, PlatformMoveReport, Share, SwitchSocket, TimeMoveReport,
    VcpuMoveReport,
};

/// A machine that only remembers what was asked of it.
struct Fake {
    state: Mutex<State>,
    /// The guest powers itself off when asked to.
    obedient: AtomicBool,
    /// How long every answer takes.
    delay: Duration,
    /// How many counters it has.
    counters: u64,
}

impl Fake {
    fn new() -> Fake {
        Fake {
            state: Mutex::new(State::Running),
            obedient: AtomicBool::new(true),
            delay: Duration::ZERO,
            counters: 1,
        }
    }

    fn change(&self, request: &str, from: State, to: State) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap();
        if *state != from {
            let what = format!("cannot {request}: the machine is {}", state.name());
            return Err(Failure::Conflict(what));
        }
        *state = to;
        Ok(())
    }
}

fn configuration() -> Configuration {
    let mut configuration = Configuration::new("vmlinux".into(), 128 << 20);
    configuration.slices = vec![
        Share {
            cpus: 1,
            memory_bytes: 64 << 20,
        },
        Share {
            cpus: 0,
            memory_bytes: 64 << 20,
        },
    ];
    configuration.updated.push(0x1c0_6000..0x1c0_7000);
    configuration.disks.push(Disk {
        path: "disk.img".into(),
        read_only: true,
        direct: false,
        slice: 0,
        data_path: Default::default(),
    });
    let forward = Forward {
        host_port: 2222,
        guest_port: 22,
    };
    configuration.networks = vec![
        Network::Tap {
            name: "tap0".into(),
            slice: 1,
            data_path: Default::default(),
        },
        Network::User {
            forwards: vec![forward],
            reaches_host: false,
            slice: 0,
            data_path: Default::default(),
        },
        Network::Switch {
            socket: SwitchSocket::Named("lan".into()),
            mac: [2, 0, 0, 0, 0, 1],
            slice: 0,
            data_path: Default::default(),
        },
    ];
    configuration
}

impl Control for Fake {
    fn view(&self) -> Result<VmView, Failure> {
        std::thread::sleep(self.delay);
        let state = *self.state.lock().unwrap();
        Ok(VmView {
            name: "fake".into(),
            pid: 1,
            machine_pid: 2,
            version: "0".into(),
            state,
            end: (state == State::Ended).then(|| "powered off by the guest".into()),
            back_end: BackEndView {
                name: "soft".into(),
                reason: "it is a test".into(),
            },
            uptime_s: 1.5,
            guest_time_s: 1.0,
            restarts: 0,
            vcpus: vec!["running".into()],
            locations: vec![LocationView { node: 1, epoch: 2 }],
            console: ConsoleView::Socket {
                path: "/nowhere".into(),
            },
            configuration: configuration(),
        })
    }

    fn counters(&self) -> Result<Counters, Failure> {
        Ok(Counters {
            uptime_s: 1.5,
            counters: (0..self.counters)
                .map(|vcpu| (format!("vcpu{vcpu}.exits.halted"), 3))
                .collect(),
        })
    }

    fn pages(&self) -> Result<Pages, Failure> {
        let page = PageCount {
            page: 0x1c07,
            reads: 1,
            writes: 2,
            upgrades: 3,
        };
        let slice = SlicePages {
            slice: 1,
            pages: vec![page],
            more_pages: 4,
            more_faults: 5,
        };
        Ok(Pages {
            uptime_s: 1.5,
            slices: vec![slice],
        })
    }

    fn faults(&self, from: Vec<Option<u64>>) -> Result<Faults, Failure> {
        let fault = |vcpu| FaultRecord {
            time_ns: 3,
            waited_ns: 2,
            page: 0x1c07,
            kind: FaultKind::Upgrade,
            purpose: FaultPurpose::Table,
            vcpu,
            user: false,
            address: u64::MAX,
            rip: 0xffff_ffff_8100_0000,
            gs_base: 0,
        };
        let slice = SliceFaults {
            slice: 0,
            next: from.first().copied().flatten().unwrap_or(7) + 2,
            missed: 1,
            faults: vec![fault(Some(1)), fault(None)],
        };
        Ok(Faults {
            uptime_s: 1.5,
            slices: vec![slice],
        })
    }

    fn pause(&self) -> Result<(), Failure> {
        self.change("pause", State::Running, State::Paused)
    }

    fn resume(&self) -> Result<(), Failure> {
        self.change("resume", State::Paused, State::Running)
    }

    fn set_balloon(&self, bytes: u64) -> Result<BalloonView, Failure> {
        if bytes > 128 << 20 {
            return Err(Failure::Conflict("the machine has less memory".into()));
        }
        Ok(BalloonView {
            target_bytes: bytes,
            actual_bytes: 4096,
        })
    }

    fn move_time(&self, node: usize) -> Result<TimeMoveReport, Failure> {
        match node {
            0 => Err(Failure::Conflict("node 0 keeps the time already".into())),
            to => Ok(TimeMoveReport {
                from: 0,
                to,
                epoch: 1,
            }),
        }
    }

    fn move_platform(&self, node: usize) -> Result<PlatformMoveReport, Failure> {
        match node {
            0 => Err(Failure::Conflict("node 0 has the platform already".into())),
            to => Ok(PlatformMoveReport {
                from: 0,
                to,
                epoch: 1,
                state_bytes: 900,
                stopped_ns: 5,
            }),
        }
    }

    fn grow(&self, node: NewNode) -> Result<ChangeView, Failure> {
        match node.host {
            Some(host) => Err(Failure::Conflict(format!("{host} has no room"))),
            None => Ok(ChangeView::default()),
        }
    }

    fn release(&self, node: usize) -> Result<ChangeView, Failure> {
        Ok(ChangeView {
            node: Some(node),
            ..ChangeView::default()
        })
    }

    fn migrate(&self, migration: Migration) -> Result<ChangeView, Failure> {
        match migration.to.as_slice() {
            [Destination::Node(node)] => self.release(*node),
            other => Err(Failure::Conflict(format!("{} destinations", other.len()))),
        }
    }

    fn change(&self) -> Result<ChangeView, Failure> {
        let mut change = self.release(2)?;
        change.released = Some(Released {
            node: 2,
            vcpus: 1,
            queues: 2,
            queues_stopped_ns: 3_000_000,
            pause_ns: 15_000_000,
            bytes: 4096,
            total_s: 0.5,
            pages_s: 0.25,
        });
        Ok(change)
    }

    fn cancel(&self) -> Result<ChangeView, Failure> {
        Err(Failure::Conflict("no node joins or leaves".into()))
    }

    fn move_vcpu(&self, vcpu: u32, node: usize) -> Result<VcpuMoveReport, Failure> {
        if vcpu > 0 {
            return Err(Failure::Conflict("there is no such vCPU".into()));
        }
        Ok(VcpuMoveReport {
            vcpu,
            from: 0,
            to: node,
            moves: 3,
            state_bytes: 1200,
            stopped_ns: 110,
            stop_ns: 5,
            save_ns: 20,
            send_ns: 40,
            resume_ns: 30,
            install_ns: 20,
        })
    }

    fn save(&self, files: Vec<File>, _: &SaveBody) -> Result<Saved, Failure> {
        Err(Failure::Failed(format!("{} files came", files.len())))
    }

    fn unread_pages(&self) -> Result<u64, Failure> {
        Ok(0)
    }

    fn save_files(&self, _: &SaveFilesBody) -> Result<(), Failure> {
        Ok(())
    }

    fn save_progress(&self, _: Identity) -> Result<Option<Vec<Written>>, Failure> {
        Ok(None)
    }

    fn end_save(&self, _: Identity) {}

    fn power_button(&self) -> Result<bool, Failure> {
        self.change("press the power button", State::Running, State::Running)?;
        if self.obedient.load(Ordering::Relaxed) {
            *self.state.lock().unwrap() = State::Ended;
        }
        Ok(true)
    }

    fn stop(&self) -> Result<(), Failure> {
        *self.state.lock().unwrap() = State::Ended;
        Ok(())
    }
}

struct Served {
    path: PathBuf,
    fake: Arc<Fake>,
    server: Option<Server>,
}

impl Served {
    fn new(name: &str, fake: Fake) -> Served {
        let path = std::env::temp_dir().join(format!("weft-api-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let fake = Arc::new(fake);
        // SAFETY: takes nothing and cannot fail.
        let user = unsafe { libc::geteuid() };
        let server = Server::start(listener, fake.clone(), vec![user]).unwrap();
        Served {
            path,
            fake,
            server: Some(server),
        }
    }

    fn client(&self) -> Client {
        Client::new(&self.path)
    }

    /// Sends bytes and reads to the end.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        let bound = Some(Duration::from_secs(20));
        stream.set_read_timeout(bound).unwrap();
        // The server may have closed already: its answer is what counts.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn get(&self, method: &str, path: &str) -> (u16, Value) {
        let answer = self.raw(format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        (status, serde_json::from_str(body).unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.finish();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_vcpu_is_moved_or_the_reason_is_told() {
    let served = Served::new("moved", Fake::new());
    let client = served.client();
    let moved = client.move_vcpu(0, 2).unwrap();
    assert_eq!((moved.to, moved.stopped_ns), (2, 110));
    let refused = client.move_vcpu(7, 2).unwrap_err();
    assert_eq!(refused.to_string(), "there is no such vCPU");
    assert!(matches!(refused, ClientError::Refused { code, .. } if code == "conflict"));
}

#[test]
fn a_balloon_gets_its_target() {
    let served = Served::new("balloon", Fake::new());
    let client = Client::new(&served.path);
    let balloon = client.set_balloon(64 << 20).unwrap();
    assert_eq!(
        (balloon.target_bytes, balloon.actual_bytes),
        (64 << 20, 4096)
    );
    let refused = client.set_balloon(1 << 40).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { code, .. } if code == "conflict"));
}

#[test]
fn the_timekeeper_is_moved_or_the_reason_is_told() {
    let served = Served::new("time", Fake::new());
    let client = served.client();
    let moved = client.move_time(2).unwrap();
    assert_eq!((moved.from, moved.to, moved.epoch), (0, 2, 1));
    let refused = client.move_time(0).unwrap_err();
    assert_eq!(refused.to_string(), "node 0 keeps the time already");
    assert!(matches!(refused, ClientError::Refused { code, .. } if code == "conflict"));
}

#[test]
fn the_platform_is_moved_or_the_reason_is_told() {
    let served = Served::new("platform", Fake::new());
    let client = served.client();
    let moved = client.move_platform(2).unwrap();
    assert_eq!((moved.from, moved.to, moved.epoch), (0, 2, 1));
    assert_eq!((moved.state_bytes, moved.stopped_ns), (900, 5));
    let refused = client.move_platform(0).unwrap_err();
    assert_eq!(refused.to_string(), "node 0 has the platform already");
    assert!(matches!(refused, ClientError::Refused { code, .. } if code == "conflict"));
}

#[test]
fn a_machine_is_seen_paused_resumed_and_stopped() {
    let served = Served::new("life", Fake::new());
    let client = served.client();
    let view = client.view(Duration::from_secs(5)).unwrap();
    assert_eq!((view.name.as_str(), view.state), ("fake", State::Running));
    assert_eq!(view.configuration, configuration());
    assert_eq!(client.pause().unwrap().state, State::Paused);
    let refused = client.pause().unwrap_err();
    assert!(matches!(&refused, ClientError::Refused { code, .. } if code == "conflict"));
    assert_eq!(refused.to_string(), "cannot pause: the machine is paused");
    assert_eq!(client.resume().unwrap().state, State::Running);
    assert_eq!(client.counters().unwrap().counters["vcpu0.exits.halted"], 3);
    let ended = client.stop(5.0).unwrap();
    assert_eq!(ended.state, State::Ended);
}

#[test]
fn faults_are_read_from_a_number_on() {
    let served = Served::new("faults", Fake::new());
    let client = served.client();
    assert_eq!(client.pages().unwrap().slices[0].pages[0].upgrades, 3);
    let first = client.faults(&[]).unwrap();
    assert_eq!(first.slices[0].next, 9);
    let second = client.faults(&[9, 1]).unwrap();
    assert_eq!(second.slices[0].next, 11);
    assert_eq!(second.slices[0].faults[0].address, u64::MAX);
    let (status, body) = served.get("GET", "/v1/vm/faults?from=1,x");
    assert_eq!(
        (status, &body["error"]["code"]),
        (400, &"bad_request".into())
    );
}

#[test]
fn a_guest_that_does_not_power_off_is_stopped_after_its_time() {
    let served = Served::new("stop", Fake::new());
    served.fake.obedient.store(false, Ordering::Relaxed);
    let before = Instant::now();
    assert_eq!(served.client().stop(0.2).unwrap().state, State::Ended);
    assert!(before.elapsed() >= Duration::from_millis(200));
    let refused = served.client().stop(1e9).unwrap_err();
    assert!(refused.to_string().contains("0 to 600"), "{refused}");
}

#[test]
fn a_paused_machine_is_stopped_at_once() {
    let served = Served::new("paused", Fake::new());
    assert_eq!(served.client().pause().unwrap().state, State::Paused);
    let before = Instant::now();
    assert_eq!(served.client().stop(60.0).unwrap().state, State::Ended);
    assert!(before.elapsed() < Duration::from_secs(30));
}

#[test]
fn nobody_there_is_told_apart() {
    let missing = Client::new(&std::env::temp_dir().join("weft-api-no-such-socket"));
    assert!(missing.view(Duration::from_secs(1)).unwrap_err().is_gone());
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let served = Served::new("refuse", Fake::new());
    let (status, body) = served.get("GET", "/v1/vms");
    assert_eq!(
        (status, body["error"]["code"].as_str()),
        (404, Some("not_found"))
    );
    let answer = served.raw(b"GET /v1/vm/stop HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    assert!(
        answer.to_lowercase().contains("\r\nallow: post\r\n"),
        "{answer}"
    );
    let body = r#"{"timout_s":1}"#;
    let stop = format!(
        "POST /v1/vm/stop HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = served.raw(stop.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(
        answer.contains("timout_s") && answer.contains("timeout_s"),
        "{answer}"
    );
}

#[test]
fn requests_are_bounded() {
    let served = Served::new("bounds", Fake::new());
    let length = REQUEST_BYTES_MAX + 1;
    let mut long =
        format!("POST /v1/vm/stop HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n")
            .into_bytes();
    long.extend(vec![b' '; length]);
    assert!(served.raw(&long).starts_with("HTTP/1.1 413"));
    let head = format!("GET /v1/vm HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(64 << 10));
    assert!(served.raw(head.as_bytes()).starts_with("HTTP/1.1 4"));
    assert!(
        served
            .raw(b"\x00\x01 not HTTP\r\n\r\n")
            .starts_with("HTTP/1.1 400")
    );
    // Half a request: given up, in time.
    let before = Instant::now();
    served.raw(b"GET /v1/vm HTTP/1.1\r\nHo");
    assert!(before.elapsed() < Duration::from_secs(15));
}

#[test]
fn many_silent_clients_do_not_keep_others_out_for_long() {
    let served = Served::new("many", Fake::new());
    let silent: Vec<UnixStream> = (0..CONNECTIONS_MAX)
        .map(|_| UnixStream::connect(&served.path).unwrap())
        .collect();
    let view = served.client().view(Duration::from_secs(15)).unwrap();
    assert_eq!(view.state, State::Running);
    drop(silent);
}

#[test]
fn clients_that_do_not_read_do_not_keep_others_out_for_long() {
    // More than a socket holds.
    let fake = Fake {
        counters: 100_000,
        ..Fake::new()
    };
    let served = Served::new("unread", fake);
    let deaf: Vec<UnixStream> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = UnixStream::connect(&served.path).unwrap();
            let request = b"GET /v1/vm/counters HTTP/1.1\r\nHost: x\r\n\r\n";
            stream.write_all(request).unwrap();
            let mut first = [0];
            stream.read_exact(&mut first).unwrap();
            stream
        })
        .collect();
    let view = served.client().view(Duration::from_secs(30)).unwrap();
    assert_eq!(view.state, State::Running);
    drop(deaf);
}

#[test]
fn too_many_waiting_requests_are_refused() {
    let delay = Duration::from_millis(300);
    let fake = Fake {
        delay,
        ..Fake::new()
    };
    let served = Served::new("busy", fake);
    let clients: Vec<_> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let client = served.client();
            std::thread::spawn(move || client.view(Duration::from_secs(20)))
        })
        .collect();
    let answers: Vec<_> = clients
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    let busy = |answer: &&Result<VmView, ClientError>| matches!(answer, Err(ClientError::Refused { code, .. }) if code == "busy");
    let refused = answers.iter().filter(busy).count();
    let good = answers.iter().filter(|answer| answer.is_ok()).count();
    assert!(refused > 0 && good >= 8, "{refused} refused, {good} good");
    assert_eq!(refused + good, answers.len());
}

// ---- The document.

/// The schema that a reference leads to.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(path) => {
            let found = document.pointer(path.strip_prefix('#').unwrap());
            resolve(
                document,
                found.unwrap_or_else(|| panic!("{path} leads nowhere")),
            )
        }
        None => schema,
    }
}

/// As much of JSON schema as the document uses; stricter in one thing: no field
/// may be absent from it.
fn check(document: &Value, schema: &Value, value: &Value, at: &str) {
    let schema = resolve(document, schema);
    if let Some(choices) = schema["oneOf"].as_array() {
        let key = value.as_object().and_then(|fields| fields.keys().next());
        // An object is chosen by its first field, a word by the words that are allowed.
        let choice = choices.iter().find(|choice| match key {
            Some(key) => choice["properties"].get(key).is_some(),
            None => choice["enum"]
                .as_array()
                .is_some_and(|words| words.contains(value)),
        });
        let choice = choice.unwrap_or_else(|| panic!("{at}: {value} is none of the choices"));
        return check(document, choice, value, at);
    }
    if value.is_null() {
        assert_eq!(schema["nullable"], true, "{at} is null");
        return;
    }
    if let Some(words) = schema["enum"].as_array() {
        assert!(words.contains(value), "{at}: {value} is not in {words:?}");
    }
    match schema["type"].as_str() {
        Some("string") => assert!(value.is_string(), "{at}: {value}"),
        Some("integer") => assert!(value.is_u64(), "{at}: {value}"),
        Some("number") => assert!(value.is_number(), "{at}: {value}"),
        Some("boolean") => assert!(value.is_boolean(), "{at}: {value}"),
        Some("array") => {
            for item in value.as_array().expect(at) {
                check(document, &schema["items"], item, &format!("{at}[]"));
            }
        }
        Some("object") => {
            let fields = value.as_object().expect(at);
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            for name in required.iter().filter_map(Value::as_str) {
                assert!(fields.contains_key(name), "{at} lacks {name}");
            }
            for (name, field) in fields {
                let other = &schema["additionalProperties"];
                let known = schema["properties"].get(name).unwrap_or(other);
                assert!(!known.is_null(), "{at}.{name} is not described");
                check(document, known, field, &format!("{at}.{name}"));
            }
        }
        other => panic!("{at}: type {other:?}"),
    }
}

#[test]
fn the_document_describes_what_is_served() {
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    let served = Served::new("document", Fake::new());
    let mut statuses = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let (status, body) = served.get(&method.to_uppercase(), path);
            let answer = &operation["responses"][status.to_string()];
            assert!(
                !answer.is_null(),
                "{method} {path}: {status} is not described"
            );
            let schema = &answer["content"]["application/json"]["schema"];
            if path != "/v1/openapi.json" {
                check(&document, schema, &body, path);
            } else {
                assert_eq!(body, document);
            }
            statuses.insert(status);
            // No other method is served at this path.
            for other in ["GET", "POST", "PUT", "DELETE", "PATCH"] {
                if operations.get(other.to_lowercase()).is_none() {
                    let (status, body) = served.get(other, path);
                    assert_eq!(status, 405, "{other} {path}");
                    check(
                        &document,
                        &operation["responses"]["405"]["content"]["application/json"]["schema"],
                        &body,
                        path,
                    );
                }
            }
        }
    }
    assert!(statuses.contains(&200));
}

#[test]
fn every_reference_leads_somewhere() {
    fn walk(document: &Value, value: &Value) {
        match value {
            Value::Object(fields) => {
                if fields.contains_key("$ref") {
                    resolve(document, value);
                }
                fields.values().for_each(|field| walk(document, field));
            }
            Value::Array(items) => items.iter().for_each(|item| walk(document, item)),
            _ => {}
        }
    }
    let document: Value = serde_json::from_str(OPENAPI).unwrap();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    walk(&document, &document);
}
