//! Exhaustive model of the move of a home among several nodes: old node 0 with its launcher, the
//! daemon of the new host, the process there with its launcher, and two slices, one on the new
//! host and one on a third, each with the session of its daemon. Every order of messages, and up to
//! two failures at any moment: hosts that are lost, processes that are killed, connections that
//! end, and an old node 0 that gives up. `docs/roles.md` has the protocol.
//!
//! Judged in every state: there is one node 0 at most that goes on. Where nothing can happen any
//! more: no slice is left without the node 0 that its session has. Without a failure the machine
//! is over there; a process that is killed before it has the state leaves it here; an old host
//! that is lost afterwards leaves it there, with all slices.

use std::collections::{HashSet, VecDeque};

const SLICES: usize = 2;
/// The slice on the new host.
const NEAR: usize = 0;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Message {
    YieldTo,
    Yielded,
    GoesOn,
    State,
    Taken,
    Failed,
    LetGo,
    GiveUp,
    Runs,
    Succeeds,
    Introduced,
    Present,
    Inherit,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Old {
    Yielding,
    /// The state is sent.
    Sent,
    /// It waits for the word that the process has ended.
    GivingUp,
    GoesOn,
    /// The machine is over here.
    Moved,
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Daemon {
    Ready,
    Taking,
    Taken,
    /// It waits until the process runs.
    LetGo,
    Over,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Taker {
    Ready,
    Taking,
    Taken,
    Runs,
    Dead,
}

/// Which process a slice takes for node 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Place {
    Old,
    /// It may change.
    YieldedOld,
    YieldedNew,
    New,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Launcher {
    Old,
    New,
    None,
}

type Channel = VecDeque<Message>;
/// Takes what can happen next.
type Then<'a> = dyn FnMut(&dyn Fn(&mut World)) + 'a;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Slice {
    place: Place,
    launcher: Launcher,
    heir: bool,
    yielded: bool,
    introduced: bool,
    from_old: Channel,
    to_old: Channel,
    from_taker: Channel,
    to_taker: Channel,
    session: Channel,
    old_link: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    old: Old,
    daemon: Daemon,
    taker: Taker,
    slices: [Slice; SLICES],
    /// Between the old launcher and the daemon.
    connected: bool,
    to_daemon: Channel,
    from_daemon: Channel,
    to_taker: Channel,
    from_taker: Channel,
    failures: Vec<&'static str>,
    /// The process had all of the state at the first failure.
    had_state: bool,
    /// A slice heard what it must not.
    misplaced: Option<(Place, Message)>,
    mutant: Mutant,
}

/// Broken versions, which must be found.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Mutant {
    None,
    /// Sessions have one launcher.
    NoHeir,
    /// A slice that has yielded ends with the link of either node 0.
    EndsWithLink,
    /// A daemon that is told to give the process up leaves it alive.
    KeepsTaker,
    /// Old node 0 goes on when it does not hear what came of the state.
    GoesOnUnasked,
    /// The process goes on before it is let go.
    RunsEarly,
}

impl World {
    fn new(mutant: Mutant) -> World {
        let slice = Slice {
            place: Place::Old,
            launcher: Launcher::Old,
            heir: mutant != Mutant::NoHeir,
            yielded: false,
            introduced: false,
            from_old: [Message::YieldTo].into(),
            to_old: Channel::new(),
            from_taker: Channel::new(),
            to_taker: Channel::new(),
            session: Channel::new(),
            old_link: true,
        };
        World {
            old: Old::Yielding,
            daemon: Daemon::Ready,
            taker: Taker::Ready,
            slices: [slice.clone(), slice],
            connected: true,
            to_daemon: Channel::new(),
            from_daemon: Channel::new(),
            to_taker: Channel::new(),
            from_taker: Channel::new(),
            failures: Vec::new(),
            had_state: false,
            misplaced: None,
            mutant,
        }
    }

    fn kill_taker(&mut self) {
        self.taker = Taker::Dead;
        self.to_taker.clear();
    }

    fn end_old(&mut self) {
        self.old = Old::Ended;
        self.from_daemon.clear();
    }

    fn go_on(&mut self) {
        self.old = Old::GoesOn;
        for slice in self.slices.iter_mut().filter(|slice| slice.old_link) {
            slice.from_old.push_back(Message::GoesOn);
        }
    }

    fn let_go(&mut self) {
        self.daemon = Daemon::LetGo;
        self.to_taker.push_back(Message::LetGo);
    }

    fn old_takes(&mut self, message: Message) {
        match (self.old, message) {
            (Old::Sent, Message::Taken) => {
                self.old = Old::Moved;
                self.to_daemon.push_back(Message::LetGo);
            }
            (Old::Sent | Old::GivingUp, Message::Failed) => {
                self.go_on();
            }
            (Old::Moved, Message::Runs | Message::Failed) => self.end_old(),
            _ => {}
        }
    }

    fn daemon_takes(&mut self, message: Message) {
        match (self.daemon, message) {
            (Daemon::Ready, Message::State) => {
                self.daemon = Daemon::Taking;
                self.to_taker.push_back(Message::State);
            }
            (Daemon::Taken, Message::LetGo) => self.let_go(),
            (Daemon::Ready | Daemon::Taking | Daemon::Taken, Message::GiveUp) => {
                if self.mutant != Mutant::KeepsTaker {
                    self.kill_taker();
                }
                self.daemon = Daemon::Over;
                self.from_daemon.push_back(Message::Failed);
            }
            (Daemon::Over, Message::GiveUp | Message::State | Message::LetGo) => {
                self.from_daemon.push_back(Message::Failed);
            }
            _ => {}
        }
    }

    fn daemon_hears(&mut self, message: Message) {
        match (self.daemon, message) {
            (Daemon::Taking, Message::Taken) => {
                self.daemon = Daemon::Taken;
                match self.connected {
                    true => self.from_daemon.push_back(Message::Taken),
                    false => self.let_go(),
                }
            }
            (Daemon::LetGo, Message::Runs) => {
                self.daemon = Daemon::Over;
                if self.connected {
                    self.from_daemon.push_back(Message::Runs);
                }
            }
            _ => {}
        }
    }

    fn taker_takes(&mut self, message: Message) {
        match (self.taker, message) {
            (Taker::Ready, Message::State) => {
                self.taker = Taker::Taking;
                for slice in &mut self.slices {
                    slice.from_taker.push_back(Message::Succeeds);
                }
            }
            (Taker::Taken, Message::LetGo) => self.settle(),
            _ => {}
        }
    }

    fn settle(&mut self) {
        self.taker = Taker::Runs;
        for slice in &mut self.slices {
            slice.session.push_back(Message::Inherit);
            slice.from_taker.push_back(Message::Present);
        }
        self.from_taker.push_back(Message::Runs);
    }

    fn slice_hears_old(&mut self, number: usize, message: Message) {
        let slice = &mut self.slices[number];
        match (slice.place, message) {
            (Place::Old, Message::YieldTo) => {
                slice.place = Place::YieldedOld;
                slice.to_old.push_back(Message::Yielded);
            }
            (Place::YieldedOld | Place::YieldedNew, Message::GoesOn) => slice.place = Place::Old,
            (Place::Dead, _) => {}
            (place, message) => self.misplaced = Some((place, message)),
        }
    }

    fn slice_hears_taker(&mut self, number: usize, message: Message) {
        let slice = &mut self.slices[number];
        match (slice.place, message) {
            (Place::YieldedOld, Message::Succeeds) => {
                slice.place = Place::YieldedNew;
                slice.to_taker.push_back(Message::Introduced);
            }
            (Place::YieldedNew, Message::Present) => slice.place = Place::New,
            // Of a process that has ended.
            (Place::Old, _) if self.taker == Taker::Dead => {}
            (Place::Dead, _) => {}
            (place, message) => self.misplaced = Some((place, message)),
        }
    }

    /// What can happen next, without failures.
    fn next(&self) -> Vec<World> {
        let mut next = Vec::new();
        let mut then = |act: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            act(&mut world);
            next.push(world);
        };
        let is_old_there = self.old != Old::Ended;
        if is_old_there && self.connected && !self.from_daemon.is_empty() {
            then(&|world| {
                let message = world.from_daemon.pop_front().unwrap();
                world.old_takes(message);
            });
        }
        if self.daemon != Daemon::Dead && !self.to_daemon.is_empty() {
            then(&|world| {
                let message = world.to_daemon.pop_front().unwrap();
                world.daemon_takes(message);
            });
        }
        if self.daemon != Daemon::Dead && !self.from_taker.is_empty() {
            then(&|world| {
                let message = world.from_taker.pop_front().unwrap();
                world.daemon_hears(message);
            });
        }
        if self.taker != Taker::Dead && !self.to_taker.is_empty() {
            then(&|world| {
                let message = world.to_taker.pop_front().unwrap();
                world.taker_takes(message);
            });
        }
        self.ends_are_noticed(&mut then);
        for number in 0..SLICES {
            self.slice_acts(number, &mut then);
        }
        next
    }

    fn ends_are_noticed(&self, then: &mut Then<'_>) {
        let is_old_there = self.old != Old::Ended;
        let is_lost = !self.connected || self.daemon == Daemon::Dead;
        if is_lost && matches!(self.old, Old::Sent | Old::GivingUp | Old::Moved) {
            // It is not known whether the machine goes on there.
            then(&|world| match world.mutant {
                Mutant::GoesOnUnasked if world.old == Old::Sent => world.go_on(),
                _ => world.end_old(),
            });
        }
        if is_lost && self.old == Old::Yielding {
            then(&|world| world.go_on());
        }
        if self.connected && !is_old_there && self.to_daemon.is_empty() {
            then(&|world| world.connected = false);
        }
        if !self.connected && self.to_daemon.is_empty() {
            match self.daemon {
                Daemon::Ready => then(&|world| {
                    world.kill_taker();
                    world.daemon = Daemon::Over;
                }),
                Daemon::Taken => then(&|world| world.let_go()),
                Daemon::Taking | Daemon::LetGo | Daemon::Over | Daemon::Dead => {}
            }
        }
        if self.taker == Taker::Dead
            && self.from_taker.is_empty()
            && !matches!(self.daemon, Daemon::Over | Daemon::Dead)
        {
            then(&|world| {
                world.daemon = Daemon::Over;
                if world.connected {
                    world.from_daemon.push_back(Message::Failed);
                }
            });
        }
        if self.daemon == Daemon::Dead && self.to_taker.is_empty() {
            match self.taker {
                Taker::Ready => then(&|world| world.kill_taker()),
                Taker::Taken => then(&|world| world.settle()),
                Taker::Taking | Taker::Runs | Taker::Dead => {}
            }
        }
    }

    fn slice_acts(&self, number: usize, then: &mut Then<'_>) {
        let slice = &self.slices[number];
        let (is_there, is_old_there) = (slice.place != Place::Dead, self.old != Old::Ended);
        let is_taker_there = self.taker != Taker::Dead;
        if is_there && !slice.from_old.is_empty() {
            then(&|world| {
                let message = world.slices[number].from_old.pop_front().unwrap();
                world.slice_hears_old(number, message);
            });
        }
        if is_there && !slice.from_taker.is_empty() {
            then(&|world| {
                let message = world.slices[number].from_taker.pop_front().unwrap();
                world.slice_hears_taker(number, message);
            });
        }
        if is_old_there && slice.old_link && !slice.to_old.is_empty() {
            then(&|world| {
                world.slices[number].to_old.pop_front();
                world.slices[number].yielded = true;
                if world.old == Old::Yielding && world.slices.iter().all(|slice| slice.yielded) {
                    world.old = Old::Sent;
                    world.to_daemon.push_back(Message::State);
                }
            });
        }
        if is_taker_there && !slice.to_taker.is_empty() {
            then(&|world| {
                world.slices[number].to_taker.pop_front();
                world.slices[number].introduced = true;
                let all = world.slices.iter().all(|slice| slice.introduced);
                if world.taker == Taker::Taking && all {
                    world.taker = Taker::Taken;
                    world.from_taker.push_back(Message::Taken);
                    if world.mutant == Mutant::RunsEarly {
                        world.settle();
                    }
                }
            });
        }
        // The session.
        if is_there && slice.heir && slice.session.front() == Some(&Message::Inherit) {
            then(&|world| {
                let slice = &mut world.slices[number];
                slice.session.pop_front();
                (slice.launcher, slice.heir) = (Launcher::New, false);
            });
        }
        let is_heir_lost = !is_taker_there && slice.session.is_empty();
        if slice.heir && is_heir_lost {
            then(&|world| world.slices[number].heir = false);
        }
        if slice.launcher == Launcher::Old && !is_old_there {
            then(&|world| world.slices[number].launcher = Launcher::None);
        }
        let is_ended = match slice.launcher {
            Launcher::Old => false,
            Launcher::New => !is_taker_there,
            Launcher::None => !slice.heir,
        };
        // Links, read to their ends.
        let is_old_lost = (!is_old_there || !slice.old_link) && slice.from_old.is_empty();
        let is_taker_lost = !is_taker_there && slice.from_taker.is_empty();
        let is_cut = match slice.place {
            Place::Old => is_old_lost,
            Place::New => is_taker_lost,
            Place::YieldedOld | Place::YieldedNew => {
                self.mutant == Mutant::EndsWithLink && is_old_lost
            }
            Place::Dead => false,
        };
        if is_there && (is_ended || is_cut) {
            then(&|world| world.slices[number].place = Place::Dead);
        }
        // A slice that is lost ends the machine of either node 0 that has it.
        let is_gone = !is_there || !slice.old_link;
        if is_gone && matches!(self.old, Old::Yielding | Old::GoesOn) {
            then(&|world| world.end_old());
        }
        let has_it = matches!(self.taker, Taker::Taking | Taker::Taken | Taker::Runs);
        if !is_there && has_it {
            then(&|world| world.kill_taker());
        }
    }

    /// What can fail.
    fn failures(&self) -> Vec<World> {
        let mut failures = Vec::new();
        let mut then = |name: &'static str, act: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            if world.failures.is_empty() {
                world.had_state = !matches!(world.taker, Taker::Ready | Taker::Dead);
            }
            act(&mut world);
            world.failures.push(name);
            failures.push(world);
        };
        if self.old != Old::Ended {
            then("old host", &|world| world.end_old());
        }
        if self.daemon != Daemon::Dead {
            then("new host", &|world| {
                world.daemon = Daemon::Dead;
                world.from_taker.clear();
                world.kill_taker();
                world.slices[NEAR].place = Place::Dead;
            });
            then("daemon", &|world| {
                world.daemon = Daemon::Dead;
                world.slices[NEAR].place = Place::Dead;
            });
        }
        if self.taker != Taker::Dead {
            then("taker", &|world| world.kill_taker());
        }
        if self.slices[1].place != Place::Dead {
            then("third host", &|world| world.slices[1].place = Place::Dead);
        }
        if self.connected {
            then("connection", &|world| {
                world.connected = false;
                world.from_daemon.clear();
            });
        }
        if self.slices[1].old_link {
            then("link", &|world| {
                world.slices[1].old_link = false;
                world.slices[1].from_old.clear();
            });
        }
        if self.old == Old::Sent {
            then("patience", &|world| {
                world.old = Old::GivingUp;
                world.to_daemon.push_back(Message::GiveUp);
            });
        }
        failures
    }

    fn judge(&self) -> Result<(), String> {
        if let Some((place, message)) = self.misplaced {
            return Err(format!(
                "{message:?} at a slice that is {place:?}: {self:?}"
            ));
        }
        match self.old == Old::GoesOn && self.taker == Taker::Runs {
            true => Err(format!("two nodes 0 go on: {self:?}")),
            false => Ok(()),
        }
    }

    fn judge_end(&self) -> Result<(), String> {
        let is = |place, launcher| {
            move |slice: &Slice| slice.place == place && slice.launcher == launcher
        };
        let stays =
            self.old == Old::GoesOn && self.slices.iter().all(is(Place::Old, Launcher::Old));
        let went =
            self.taker == Taker::Runs && self.slices.iter().all(is(Place::New, Launcher::New));
        let is_over = self.slices.iter().all(|slice| slice.place == Place::Dead)
            && self.old == Old::Ended
            && self.taker == Taker::Dead;
        let is_right = match self.failures[..] {
            [] => went,
            ["taker"] if !self.had_state => stays,
            ["patience"] => stays || went,
            ["old host" | "connection"] if self.had_state => went,
            _ => stays || went || is_over,
        };
        match is_right {
            true => Ok(()),
            false => Err(format!("a wrong end: {self:?}")),
        }
    }
}

/// Judges every state that can be reached. How many there are.
fn explore(mutant: Mutant, failures: usize) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut left = vec![World::new(mutant)];
    while let Some(world) = left.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        world.judge()?;
        let next = world.next();
        if next.is_empty() {
            world.judge_end()?;
        }
        left.extend(next);
        if world.failures.len() < failures {
            left.extend(world.failures());
        }
    }
    Ok(seen.len())
}

#[test]
fn a_machine_has_one_node_0_whatever_fails() {
    for (failures, least) in [(0, 50), (1, 1_000), (2, 10_000)] {
        let states = explore(Mutant::None, failures).unwrap();
        assert!(states > least, "{states} states with {failures} failures");
    }
}

#[test]
fn broken_versions_are_found() {
    for mutant in [
        Mutant::NoHeir,
        Mutant::EndsWithLink,
        Mutant::KeepsTaker,
        Mutant::GoesOnUnasked,
        Mutant::RunsEarly,
    ] {
        assert!(explore(mutant, 2).is_err(), "{mutant:?}");
    }
}
