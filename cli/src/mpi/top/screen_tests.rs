use super::*;
use weft_mpi::request::{MachineStatus, TaskStatus};

/// A cluster with two machines on each host.
pub fn status(hosts: usize) -> Status {
    let name = |number: usize| format!("local-{}", number + 1);
    let host = |number: usize| HostStatus {
        name: name(number),
        job: (4711 + number).to_string(),
        left: Some(300.0 + number as f64),
        leaving_takes: 4.0,
        begins: Some(280.0 + number as f64),
        answers: true,
        leaves: false,
        memory: 1 << 30,
        cores: 4,
    };
    let machine = |number: usize| MachineStatus {
        name: format!("vm-{number}"),
        address: format!("10.77.0.{}", number + 1),
        host: Some(name(number / 2)),
        others: Vec::new(),
        moves_to: None,
        task: None,
        ready: true,
        resident: 64 << 20,
        memory: 128 << 20,
    };
    Status {
        name: "c1".into(),
        phase: "running".into(),
        program: Some("ep 31".into()),
        seconds: 42.0,
        wanted: hosts,
        asked: 0,
        waiting: Vec::new(),
        hosts: (0..hosts).map(host).collect(),
        machines: (0..2 * hosts).map(machine).collect(),
        moves: 3,
        log: vec!["12.3 s: all machines are ready after 12.3 s".into()],
        trouble: None,
        exit_code: None,
    }
}

/// One more machine moves, for three of ten seconds.
pub fn moving(status: &mut Status, machine: usize, to: &str) {
    status.machines[machine].moves_to = Some(to.into());
    status.machines[machine].task = Some(TaskStatus {
        does: "moves".into(),
        seconds: 3.0,
        expected: Some(10.0),
    });
}

fn press(screen: &mut Screen, keys: &str) -> Vec<Act> {
    let key = |letter| match letter {
        '\n' => Key::Enter,
        '<' => Key::Erase,
        '!' => Key::Escape,
        letter => Key::Letter(letter),
    };
    keys.chars()
        .filter_map(|letter| screen.key(key(letter)))
        .collect()
}

fn ask(request: Request) -> Act {
    Act::Ask(request)
}

#[test]
fn plus_and_minus_count_what_was_asked_for_before_it_is_seen() {
    let mut screen = Screen::new(status(2));
    let both = [ask(Request::Hosts(3)), ask(Request::Hosts(4))];
    assert_eq!(press(&mut screen, "+="), both);
    // A status of before the answers.
    screen.read(status(2), Output::default());
    assert_eq!(press(&mut screen, "-"), [ask(Request::Hosts(3))]);
    for _ in 0..3 {
        screen.answered("refused".into(), true);
    }
    screen.read(status(2), Output::default());
    assert_eq!(screen.wanted(), 2);
    assert_eq!(press(&mut screen, "n"), [ask(Request::NewNode)]);
    assert_eq!(screen.wanted(), 3);
}

#[test]
fn a_host_goes_and_the_cluster_ends_after_a_yes_only() {
    let mut screen = Screen::new(status(3));
    assert_eq!(press(&mut screen, "jrnrq"), []);
    let release = ask(Request::Release("local-2".into()));
    assert_eq!(press(&mut screen, "ry"), [release]);
    assert_eq!(press(&mut screen, "xnx!x\n"), []);
    assert_eq!(press(&mut screen, "xy"), [ask(Request::Exit)]);
    assert_eq!(press(&mut screen, "q"), [Act::Quit]);
}

#[test]
fn answers_are_typed_and_can_be_called_off() {
    let mut screen = Screen::new(status(3));
    assert_eq!(press(&mut screen, "s12<\n"), [ask(Request::Shrink(1))]);
    assert_eq!(press(&mut screen, "s1!"), []);
    assert_eq!(press(&mut screen, "s\n"), []);
    assert_eq!(press(&mut screen, "sx\n"), []);
    let refused = Message::Trouble("`x` is not a number of hosts".into());
    assert_eq!(screen.message(), refused);
    let file = ask(Request::Deploy("/tmp/q x".into()));
    assert_eq!(press(&mut screen, "d/tmp/q x\n"), [file]);
}

#[test]
fn the_same_host_stays_chosen_while_others_go() {
    let mut screen = Screen::new(status(3));
    press(&mut screen, "jj");
    let mut next = status(3);
    next.hosts.remove(0);
    screen.read(next, Output::default());
    let release = ask(Request::Release("local-3".into()));
    assert_eq!(press(&mut screen, "ry"), [release]);
    screen.read(status(0), Output::default());
    assert_eq!(press(&mut screen, "ryjk"), []);
}

#[test]
fn after_the_end_any_key_leaves_and_clocks_stand() {
    let ends = |code, phase: &str, is_left| {
        let mut screen = Screen::new(status(1));
        screen.status.exit_code = code;
        screen.status.phase = phase.into();
        press(&mut screen, "s1");
        screen.gone(is_left);
        screen.age(Duration::from_secs(100));
        assert_eq!(screen.seconds(), 42.0);
        let end = screen.end.clone().unwrap();
        assert_eq!(screen.message(), Message::Trouble(end.clone()));
        assert_eq!(screen.key(Key::Escape), Some(Act::Quit));
        end
    };
    assert_eq!(
        ends(Some(3), "ending", false),
        "c1 has ended with exit code 3"
    );
    assert!(ends(Some(122), "ending", true).contains("weft mpi forget c1"));
    assert!(ends(Some(121), "saved", true).contains("weft mpi resume c1"));
    assert!(ends(None, "running", true).contains("weft mpi attach c1"));
}

#[test]
fn clocks_go_on_between_two_readings() {
    let mut screen = Screen::new(status(1));
    screen.age(Duration::from_secs(9));
    assert_eq!(screen.left(300.0), 291.0);
    assert_eq!(screen.since(1.0), 3.0);
    assert_eq!(screen.silent(), Some(9));
}
