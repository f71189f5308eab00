//! What `weft mpi top` shows and has chosen, and what its keys mean.

use std::path::PathBuf;
use std::time::Duration;

use weft_mpi::request::{HostStatus, Output, Request, Status};

use crate::top::Key;

/// Longest answer to a question, letters.
const ANSWER_MAX: usize = 4096;
/// What is shown of moves does not go on for longer than this without news.
const MOVES_GO_ON: Duration = Duration::from_secs(2);
/// Readings after which an answer that is not bad is old.
const NEWS_LAST: u32 = 10;
/// Without news for this long, the launcher counts as silent.
const SILENT: Duration = Duration::from_secs(4);

/// What a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    Quit,
    Ask(Request),
}

/// How the next key is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    Commands,
    /// How many hosts stay?
    Shrink(String),
    /// Which file?
    Deploy(String),
    /// Leave this host?
    Release(String),
    /// End the cluster?
    Exit,
}

/// The line above the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    Nothing,
    /// It waits for keys.
    Question(String),
    News(String),
    /// It is bad.
    Trouble(String),
}

/// See the module.
pub struct Screen {
    pub status: Status,
    pub output: Output,
    /// The place of the chosen host.
    pub chosen: usize,
    /// The output has all room.
    pub is_large: bool,
    /// How the cluster ended, as a sentence.
    pub end: Option<String>,
    /// Since the status was read.
    age: Duration,
    mode: Mode,
    /// Why the status cannot be read.
    trouble: Option<String>,
    /// What became of the last key, and whether it was refused.
    said: Option<(String, bool)>,
    /// Readings since then.
    shown_for: u32,
    /// Hosts that keys asked for and no status has shown yet.
    wanted: Option<usize>,
    /// Requests after which the number of hosts that are wanted is known again.
    unanswered: usize,
}

impl Screen {
    pub fn new(status: Status) -> Screen {
        Screen {
            status,
            output: Output::default(),
            chosen: 0,
            is_large: false,
            end: None,
            age: Duration::ZERO,
            mode: Mode::Commands,
            trouble: None,
            said: None,
            shown_for: 0,
            wanted: None,
            unanswered: 0,
        }
    }

    pub fn read(&mut self, status: Status, output: Output) {
        let before = self.chosen_host().map(|host| host.name.clone());
        self.status = status;
        self.output = output;
        self.trouble = None;
        self.shown_for += 1;
        if self.shown_for > NEWS_LAST {
            self.said = self.said.take().filter(|(_, is_bad)| *is_bad);
        }
        if self.unanswered == 0 {
            self.wanted = None;
        }
        // The same host stays chosen where hosts come and go.
        let hosts = &self.status.hosts;
        if let Some(at) = before.and_then(|name| hosts.iter().position(|host| host.name == name)) {
            self.chosen = at;
        }
        self.clamp();
    }

    pub fn trouble(&mut self, why: String) {
        self.trouble = Some(why);
    }

    /// The launcher has answered the request of a key that is not a file to deploy.
    pub fn answered(&mut self, sentence: String, is_refused: bool) {
        self.unanswered = self.unanswered.saturating_sub(1);
        self.say(sentence, is_refused);
    }

    pub fn say(&mut self, sentence: String, is_bad: bool) {
        self.said = Some((sentence, is_bad));
        self.shown_for = 0;
    }

    /// The launcher has ended. `is_left`: something of the cluster is there still.
    pub fn gone(&mut self, is_left: bool) {
        let name = &self.status.name;
        self.end = Some(match (self.status.exit_code, is_left) {
            (Some(code), true) if self.status.phase == "saved" => format!(
                "all machines of {name} are saved (exit code {code}): `weft mpi resume {name}` \
                 goes on with them"
            ),
            (Some(code), true) => format!(
                "{name} has ended with exit code {code}; its logs are kept until `weft mpi forget \
                 {name}`"
            ),
            (Some(code), false) => format!("{name} has ended with exit code {code}"),
            (None, true) => format!(
                "the launcher of {name} is gone, and what runs there runs on: `weft mpi attach \
                 {name}` goes on with it"
            ),
            (None, false) => format!("{name} has ended, and nothing of it is left"),
        });
    }

    /// The status was read this long ago. After the end, clocks stand.
    pub fn age(&mut self, age: Duration) {
        if self.end.is_none() {
            self.age = age;
        }
    }

    /// Seconds since the launcher's start.
    pub fn seconds(&self) -> f64 {
        self.status.seconds + self.age.as_secs_f64()
    }

    /// How many of seconds that were left are left now.
    pub fn left(&self, seconds: f64) -> f64 {
        seconds - self.age.as_secs_f64()
    }

    /// Seconds since the begin of something that was under way at the last reading.
    pub fn since(&self, seconds: f64) -> f64 {
        seconds + self.age.min(MOVES_GO_ON).as_secs_f64()
    }

    /// Seconds without an answer, if they are too many.
    pub fn silent(&self) -> Option<u64> {
        let is_silent = self.age > SILENT && self.end.is_none();
        is_silent.then_some(self.age.as_secs())
    }

    /// How many hosts are wanted, with what keys have asked for just now.
    pub fn wanted(&self) -> usize {
        self.wanted.unwrap_or(self.status.wanted)
    }

    fn chosen_host(&self) -> Option<&HostStatus> {
        self.status.hosts.get(self.chosen)
    }

    fn clamp(&mut self) {
        self.chosen = self.chosen.min(self.status.hosts.len().saturating_sub(1));
    }

    pub fn message(&self) -> Message {
        if let Some(end) = &self.end {
            return Message::Trouble(end.clone());
        }
        let question = match &self.mode {
            Mode::Commands => None,
            Mode::Shrink(typed) => Some(format!(
                "How many hosts stay, those that last longest? {typed}_  Enter, or Esc"
            )),
            Mode::Deploy(typed) => Some(format!(
                "Which file goes to the home of all machines? {typed}_  Enter, or Esc"
            )),
            Mode::Release(host) => Some(format!(
                "Release {host}? Its machines leave it now, and it goes back. y yes, n no"
            )),
            Mode::Exit => Some(format!(
                "End {}, with its program and machines, and give all hosts back? y yes, n no",
                self.status.name
            )),
        };
        match (question, &self.said, &self.trouble) {
            (Some(question), ..) => Message::Question(question),
            (None, Some((said, true)), _) => Message::Trouble(said.clone()),
            (None, Some((said, false)), _) => Message::News(said.clone()),
            (None, None, Some(why)) => Message::Trouble(format!("no status: {why}")),
            (None, None, None) => Message::Nothing,
        }
    }

    pub fn key(&mut self, key: Key) -> Option<Act> {
        if key == Key::Interrupt || self.end.is_some() {
            return Some(Act::Quit);
        }
        // What is said while an answer is typed is shown after that.
        if self.mode == Mode::Commands {
            self.said = None;
        }
        match std::mem::replace(&mut self.mode, Mode::Commands) {
            Mode::Commands => self.command_key(key),
            Mode::Release(host) if key == Key::Letter('y') => self.ask(Request::Release(host)),
            Mode::Exit if key == Key::Letter('y') => self.ask(Request::Exit),
            Mode::Release(_) | Mode::Exit => None,
            Mode::Shrink(mut typed) => match typing(&mut typed, key) {
                Typing::GoesOn => {
                    self.mode = Mode::Shrink(typed);
                    None
                }
                Typing::Over if typed.is_empty() => None,
                Typing::Over => match typed.trim().parse() {
                    Ok(count) => self.ask(Request::Shrink(count)),
                    Err(_) => {
                        self.said = Some((format!("`{typed}` is not a number of hosts"), true));
                        None
                    }
                },
            },
            Mode::Deploy(mut typed) => match typing(&mut typed, key) {
                Typing::GoesOn => {
                    self.mode = Mode::Deploy(typed);
                    None
                }
                Typing::Over if typed.is_empty() => None,
                Typing::Over => self.ask(Request::Deploy(PathBuf::from(typed))),
            },
        }
    }

    fn command_key(&mut self, key: Key) -> Option<Act> {
        match key {
            Key::Letter('q') => return Some(Act::Quit),
            Key::Letter('+' | '=') => return self.ask(Request::Hosts(self.wanted() + 1)),
            // The launcher says that it has one host at least.
            Key::Letter('-') => {
                return self.ask(Request::Hosts(self.wanted().saturating_sub(1)));
            }
            Key::Letter('n') => return self.ask(Request::NewNode),
            Key::Letter('s') => self.mode = Mode::Shrink(String::new()),
            Key::Letter('d') => self.mode = Mode::Deploy(String::new()),
            Key::Letter('x') => self.mode = Mode::Exit,
            Key::Letter('o') => self.is_large = !self.is_large,
            Key::Letter('r') => {
                let host = self.chosen_host().map(|host| host.name.clone());
                match host {
                    Some(host) => self.mode = Mode::Release(host),
                    None => self.said = Some(("no host is there yet".into(), true)),
                }
            }
            Key::Up | Key::Letter('k') => self.chosen = self.chosen.saturating_sub(1),
            Key::Down | Key::Letter('j') => self.chosen += 1,
            Key::Letter(_) | Key::Tab | Key::Enter | Key::Escape | Key::Erase | Key::Interrupt => {}
        }
        self.clamp();
        None
    }

    fn ask(&mut self, request: Request) -> Option<Act> {
        let (wanted, said) = match &request {
            Request::Hosts(count) => (Some(*count), format!("{count} hosts")),
            Request::NewNode => (Some(self.wanted() + 1), "one host more".into()),
            Request::Shrink(count) => (Some(*count), format!("no more than {count} hosts")),
            Request::Release(host) => (self.wanted, format!("to release {host}")),
            Request::Extend(host, _) => (self.wanted, format!("a later end of {host}")),
            Request::Deploy(file) => (self.wanted, format!("to deploy {}", file.display())),
            Request::Exit => (self.wanted, "the end".into()),
            Request::Status | Request::Output(_) => return None,
        };
        self.wanted = wanted;
        self.unanswered += usize::from(!matches!(request, Request::Deploy(_)));
        self.say(format!("asked for: {said}"), false);
        Some(Act::Ask(request))
    }
}

/// Whether an answer is being typed still.
enum Typing {
    GoesOn,
    /// With nothing, if it was called off.
    Over,
}

fn typing(typed: &mut String, key: Key) -> Typing {
    match key {
        Key::Letter(letter) if typed.len() < ANSWER_MAX => typed.push(letter),
        Key::Erase => drop(typed.pop()),
        Key::Enter => return Typing::Over,
        Key::Escape => {
            typed.clear();
            return Typing::Over;
        }
        Key::Letter(_) | Key::Up | Key::Down | Key::Tab | Key::Interrupt => {}
    }
    Typing::GoesOn
}

#[cfg(test)]
#[path = "screen_tests.rs"]
pub mod tests;
