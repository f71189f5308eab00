//! What `weft top` shows and has chosen, and what its keys mean.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use weft_cluster::{HostView, LOG_MAX, LogRecord, Overview, RunView, WaitView};

/// What is listed above the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tab {
    Hosts,
    Work,
}

/// A key that means something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Letter(char),
    Up,
    Down,
    Tab,
    Enter,
    Escape,
    Erase,
    /// Ctrl-C.
    Interrupt,
}

impl Key {
    pub fn of(event: &KeyEvent) -> Option<Key> {
        let held = KeyModifiers::CONTROL | KeyModifiers::ALT;
        let is_held = event.modifiers.intersects(held);
        Some(match event.code {
            KeyCode::Char('c') if is_held => Key::Interrupt,
            // What Backspace sends on some terminals.
            KeyCode::Char('h') if is_held => Key::Erase,
            KeyCode::Char(_) if is_held => return None,
            KeyCode::Char(letter) => Key::Letter(letter),
            KeyCode::Up => Key::Up,
            KeyCode::Down => Key::Down,
            KeyCode::Tab | KeyCode::Left | KeyCode::Right => Key::Tab,
            KeyCode::Enter => Key::Enter,
            KeyCode::Esc => Key::Escape,
            KeyCode::Backspace => Key::Erase,
            _ => return None,
        })
    }
}

/// What a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    Quit,
    Cordon(String),
    Drain(String),
    Uncordon(String),
    HandsOff(bool),
}

/// How the next key is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    Commands,
    Filter,
    /// Drain this host?
    Confirm(String),
}

/// See the module.
pub struct Screen {
    pub overview: Overview,
    /// Oldest first.
    pub log: Vec<LogRecord>,
    pub tab: Tab,
    /// Of the lines that fit the filter.
    pub chosen: usize,
    pub filter: String,
    mode: Mode,
    /// Why the cluster cannot be read.
    trouble: Option<String>,
    /// What went wrong with a key.
    said: Option<String>,
}

impl Screen {
    pub fn new(overview: Overview, log: Vec<LogRecord>) -> Screen {
        Screen {
            overview,
            log,
            tab: Tab::Hosts,
            chosen: 0,
            filter: String::new(),
            mode: Mode::Commands,
            trouble: None,
            said: None,
        }
    }

    pub fn last_record(&self) -> u64 {
        self.log.last().map_or(0, |record| record.number)
    }

    pub fn read(&mut self, overview: Overview, log: Vec<LogRecord>) {
        let before = self.chosen_host().map(|host| host.name.clone());
        self.overview = overview;
        self.log.extend(log);
        let surplus = self.log.len().saturating_sub(LOG_MAX as usize);
        self.log.drain(..surplus);
        self.trouble = None;
        // The same host stays chosen where hosts come and go.
        if let Some(name) = before
            && let Some(at) = self.hosts().iter().position(|host| host.name == name)
        {
            self.chosen = at;
        }
        self.clamp();
    }

    pub fn trouble(&mut self, why: String) {
        self.trouble = Some(why);
    }

    pub fn say(&mut self, what: String) {
        self.said = Some(what);
    }

    fn fits(&self, words: &[&str]) -> bool {
        let wanted = self.filter.to_lowercase();
        words
            .iter()
            .any(|word| word.to_lowercase().contains(&wanted))
    }

    pub fn hosts(&self) -> Vec<&HostView> {
        let hosts = self.overview.hosts.iter();
        hosts
            .filter(|host| self.fits(&[&host.name, host.state.name()]))
            .collect()
    }

    pub fn runs(&self) -> Vec<&RunView> {
        let runs = self.overview.runs.iter();
        runs.filter(|run| {
            let hosts = run.parts.iter().map(|part| &part.host[..]);
            let mut words: Vec<&str> = hosts.collect();
            words.extend([&run.name[..], &run.user, run.kind.name()]);
            self.fits(&words)
        })
        .collect()
    }

    pub fn waits(&self) -> Vec<&WaitView> {
        let waits = self.overview.waits.iter();
        waits
            .filter(|wait| self.fits(&[&wait.name, &wait.user, &wait.home, wait.kind.name()]))
            .collect()
    }

    pub fn chosen_host(&self) -> Option<&HostView> {
        match self.tab {
            Tab::Hosts => self.hosts().get(self.chosen).copied(),
            Tab::Work => None,
        }
    }

    fn lines(&self) -> usize {
        match self.tab {
            Tab::Hosts => self.hosts().len(),
            Tab::Work => self.runs().len() + self.waits().len(),
        }
    }

    fn clamp(&mut self) {
        self.chosen = self.chosen.min(self.lines().saturating_sub(1));
    }

    /// The last line: what keys do, or what goes wrong. `true`: it is bad news.
    pub fn footer(&self) -> (String, bool) {
        if let Mode::Confirm(host) = &self.mode {
            return (
                format!("Drain {host}: all that can move leaves it. y yes, n no"),
                true,
            );
        }
        if let Some(why) = &self.trouble {
            return (format!("The cluster cannot be read: {why}"), true);
        }
        if let Some(said) = &self.said {
            return (said.clone(), true);
        }
        match self.mode {
            Mode::Filter => (
                format!("/{}▏  Enter keeps it, Esc ends it", self.filter),
                false,
            ),
            _ => {
                let filter = match self.filter.is_empty() {
                    true => "/ filter".to_owned(),
                    false => format!("/ filter ({}), Esc ends it", self.filter),
                };
                let keys = match self.tab {
                    Tab::Hosts => "c cordon  d drain  u uncordon  ",
                    Tab::Work => "",
                };
                let text =
                    format!("q quit  Tab hosts or work  ↑↓ choose  {filter}  {keys}h hands off");
                (text, false)
            }
        }
    }

    pub fn key(&mut self, key: Key) -> Option<Act> {
        if key == Key::Interrupt {
            return Some(Act::Quit);
        }
        self.said = None;
        match std::mem::replace(&mut self.mode, Mode::Commands) {
            Mode::Confirm(host) => (key == Key::Letter('y')).then_some(Act::Drain(host)),
            Mode::Filter => {
                self.mode = Mode::Filter;
                self.filter_key(key);
                None
            }
            Mode::Commands => self.command_key(key),
        }
    }

    fn filter_key(&mut self, key: Key) {
        match key {
            Key::Letter(letter) => self.filter.push(letter),
            Key::Erase => drop(self.filter.pop()),
            Key::Enter => self.mode = Mode::Commands,
            Key::Escape => {
                self.filter.clear();
                self.mode = Mode::Commands;
            }
            Key::Up | Key::Down | Key::Tab | Key::Interrupt => {}
        }
        self.clamp();
    }

    fn command_key(&mut self, key: Key) -> Option<Act> {
        let chosen = self.chosen_host().map(|host| host.name.clone());
        match key {
            Key::Letter('q') => return Some(Act::Quit),
            Key::Letter('/') => self.mode = Mode::Filter,
            Key::Letter('c') if self.chosen_host().is_some_and(|host| host.draining) => {
                self.said = Some("It is drained: u calls that off".into());
            }
            Key::Letter('c') => return chosen.map(Act::Cordon),
            Key::Letter('u') => return chosen.map(Act::Uncordon),
            Key::Letter('d') => self.mode = chosen.map_or(Mode::Commands, Mode::Confirm),
            Key::Letter('h') => return Some(Act::HandsOff(!self.overview.hands_off)),
            Key::Up | Key::Letter('k') => self.chosen = self.chosen.saturating_sub(1),
            Key::Down | Key::Letter('j') => self.chosen += 1,
            Key::Tab => {
                self.tab = match self.tab {
                    Tab::Hosts => Tab::Work,
                    Tab::Work => Tab::Hosts,
                };
                self.chosen = 0;
            }
            Key::Escape => self.filter.clear(),
            Key::Letter(_) | Key::Enter | Key::Erase | Key::Interrupt => {}
        }
        self.clamp();
        None
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use weft_cluster::{HostReport, HostState, WorkKind};

    use crate::work::part;

    pub fn overview(hosts: &[&str]) -> Overview {
        let host = |name: &&str| HostView {
            name: (*name).into(),
            address: format!("{name}:7117"),
            state: HostState::Lends,
            alive: true,
            cordoned: false,
            draining: false,
            trouble: None,
            cores: 8,
            cores_free: 3,
            memory_mib: 8192,
            memory_free_mib: 2048,
            cores_stranded: 0,
            report: Some(HostReport::default()),
        };
        Overview {
            cluster: "fragments".into(),
            policy: "fragbff-fewest-hosts".into(),
            hands_off: false,
            leader: Some("alpha".into()),
            hosts: hosts.iter().map(host).collect(),
            runs: vec![RunView {
                name: "web".into(),
                kind: WorkKind::Machine,
                user: "ann".into(),
                home: "alpha".into(),
                priority: 0,
                parts: vec![part("alpha", 2, 1024), part("beta", 2, 512)],
                agent: true,
                why: "web starts on alpha and beta.".into(),
                slow_down: 1.39,
                live: None,
                moving: None,
                failure: None,
                move_state: None,
            }],
            waits: Vec::new(),
            next_moves: Vec::new(),
            damaged: Vec::new(),
            revision: 0,
        }
    }

    fn press(screen: &mut Screen, keys: &str) -> Vec<Act> {
        let key = |letter| match letter {
            '\n' => Key::Enter,
            '\t' => Key::Tab,
            '!' => Key::Escape,
            letter => Key::Letter(letter),
        };
        keys.chars()
            .filter_map(|letter| screen.key(key(letter)))
            .collect()
    }

    #[test]
    fn a_host_is_drained_after_a_yes_only() {
        let mut screen = Screen::new(overview(&["alpha", "beta"]), Vec::new());
        assert_eq!(press(&mut screen, "jdn"), []);
        assert_eq!(press(&mut screen, "dq"), []);
        assert_eq!(press(&mut screen, "dy"), [Act::Drain("beta".into())]);
        assert_eq!(press(&mut screen, "c"), [Act::Cordon("beta".into())]);
        assert_eq!(press(&mut screen, "h"), [Act::HandsOff(true)]);
    }

    #[test]
    fn letters_with_control_are_not_the_letters() {
        let of = |letter, held| Key::of(&KeyEvent::new(KeyCode::Char(letter), held));
        assert_eq!(of('h', KeyModifiers::CONTROL), Some(Key::Erase));
        assert_eq!(of('u', KeyModifiers::CONTROL), None);
        assert_eq!(of('d', KeyModifiers::ALT), None);
        assert_eq!(of('c', KeyModifiers::CONTROL), Some(Key::Interrupt));
        assert_eq!(of('H', KeyModifiers::SHIFT), Some(Key::Letter('H')));
    }

    #[test]
    fn the_filter_takes_letters_until_it_is_kept() {
        let mut screen = Screen::new(overview(&["alpha", "beta"]), Vec::new());
        assert_eq!(press(&mut screen, "/bet\n"), []);
        assert_eq!(screen.hosts().len(), 1);
        assert_eq!(press(&mut screen, "u"), [Act::Uncordon("beta".into())]);
        assert_eq!(press(&mut screen, "!"), []);
        assert_eq!(screen.hosts().len(), 2);
        assert_eq!(press(&mut screen, "/none\nc"), []);
    }

    #[test]
    fn the_same_host_stays_chosen_while_others_come() {
        let mut screen = Screen::new(overview(&["beta"]), Vec::new());
        screen.read(overview(&["alpha", "beta", "gamma"]), Vec::new());
        assert_eq!(press(&mut screen, "c"), [Act::Cordon("beta".into())]);
    }

    #[test]
    fn keys_for_hosts_do_nothing_among_the_work() {
        let mut screen = Screen::new(overview(&["alpha"]), Vec::new());
        assert_eq!(press(&mut screen, "\tcdyu"), []);
        assert_eq!(press(&mut screen, "q"), [Act::Quit]);
    }
}
