use super::*;
use crate::mpi::top::screen::tests::{moving, status};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use std::time::Duration;
use weft_mpi::request::WaitingJob;

fn text(screen: &Screen, columns: u16, rows: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| draw(frame, screen)).unwrap();
    terminal.backend().to_string()
}

fn line<'a>(shown: &'a str, word: &str) -> &'a str {
    let found = shown.lines().find(|line| line.contains(word));
    found.unwrap_or_else(|| panic!("no {word} in\n{shown}"))
}

fn busy(hosts: usize) -> Screen {
    let mut screen = Screen::new(status(hosts));
    if hosts > 1 {
        moving(&mut screen.status, 0, "local-2");
        screen.status.hosts[0].begins = Some(12.0);
        screen.status.hosts[1].answers = false;
    }
    if hosts > 30 {
        for machine in 10..20 {
            moving(&mut screen.status, machine, "local-30");
        }
    }
    screen.status.asked = 1;
    screen.status.waiting = vec![WaitingJob {
        job: "4811".into(),
        why: "Priority".into(),
    }];
    for number in 0..12 {
        let sentence = format!(
            "{number}.5 s: vm-{number} moves from local-1 to local-2: local-1 ends in 40 s, and to \
             leave it takes 3.2 s; to local-2."
        );
        screen.status.log.push(sentence);
    }
    screen.output.stdout = Stream {
        length: 12345,
        end: (0..40).map(|n| format!("step {n} of 100\n")).collect(),
    };
    screen.output.stderr = Stream {
        length: 9,
        end: "oh: warm\n".into(),
    };
    screen
}

#[test]
fn hosts_have_clocks_marks_and_their_machines() {
    let mut screen = busy(2);
    screen.age(Duration::from_secs(2));
    let shown = text(&screen, 80, 24);
    let first = line(&shown, "> local-1");
    for word in ["4711", "leaves soon", "4:58", "0:10", "2  vm-0 vm-1"] {
        assert!(first.contains(word), "{word}: {shown}");
    }
    assert!(line(&shown, "  local-2 ").contains("silent"), "{shown}");
    assert!(line(&shown, "4811").contains("Priority"), "{shown}");
    let moves = line(&shown, "vm-0 moves from local-1 to local-2  █");
    assert!(moves.contains("████████········ 5.0 of 10.0 s"), "{moves}");
    assert!(shown.contains("err│ oh: warm"), "{shown}");
    assert!(line(&shown, "OUTPUT").contains("errors 9"), "{shown}");
    assert!(line(&shown, "q quit").contains("+- hosts"), "{shown}");
}

#[test]
fn a_move_that_takes_longer_says_so() {
    assert_eq!(bar(BAR, 12.0, 10.0), "████████████████ 12.0 s, not 10.0");
    assert_eq!(bar(0, 3.0, 10.0), "3.0 of 10.0 s");
    assert_eq!(bar(BAR, 0.0, 0.0), "················ 0.0 of 0.0 s");
}

#[test]
fn the_chosen_host_of_many_is_seen() {
    let mut screen = busy(60);
    screen.chosen = 59;
    let shown = text(&screen, 80, 24);
    assert!(shown.contains("UNDER WAY 11"), "{shown}");
    assert!(shown.contains("> local-60"), "{shown}");
}

#[test]
fn the_output_takes_all_room() {
    let mut screen = busy(2);
    screen.is_large = true;
    let shown = text(&screen, 80, 24);
    assert!(!shown.contains("local-2 "), "{shown}");
    assert!(shown.contains("step 22 of 100"), "{shown}");
    assert!(shown.contains("err│ oh: warm"), "{shown}");
}

#[test]
fn the_end_is_a_sentence() {
    let mut screen = busy(1);
    screen.status.exit_code = Some(3);
    screen.gone(false);
    let shown = text(&screen, 80, 24);
    assert!(shown.contains("! c1 has ended with exit code 3"), "{shown}");
    assert!(shown.contains("any key leaves the page"), "{shown}");
}

/// No size of a terminal is a panic, and a narrow one shows what matters.
#[test]
fn it_draws_on_any_terminal() {
    for hosts in [0, 1, 8, 60] {
        let mut screen = busy(hosts);
        for rows in [1, 2, 3, 5, 8, 11, 15, 24, 40] {
            for columns in [1, 2, 7, 20, 60, 80, 300] {
                text(&screen, columns, rows);
            }
        }
        screen.status.trouble = Some("squeue does not answer".into());
        let shown = text(&screen, 60, 15);
        assert!(shown.contains("! squeue does not answer"), "{shown}");
        assert!(shown.contains("q quit"), "{shown}");
        assert!(hosts == 0 || shown.contains("local-1"), "{shown}");
    }
}

/// For a look: `cargo test -p weft-cli pictures -- --ignored --nocapture`.
#[test]
#[ignore = "prints pages to look at"]
fn pictures() {
    for (columns, rows) in [(80, 24), (120, 40), (60, 15)] {
        for hosts in [0, 1, 8, 60] {
            println!("{}", text(&busy(hosts), columns, rows));
        }
    }
}
