//! Questions to other slices, and those who wait for the answers.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

struct Open<T> {
    /// By ticket: who is asked, and the answer, once it is there.
    waiting: HashMap<u64, (usize, Option<T>)>,
    last_ticket: u64,
    /// Slices that answer nothing any more.
    lost: HashSet<usize>,
    /// No answer will come any more.
    over: bool,
}

/// Questions that are under way. Each has a ticket, which the answer carries.
pub(super) struct Questions<T> {
    open: Mutex<Open<T>>,
    answered: Condvar,
}

impl<T> Default for Questions<T> {
    fn default() -> Self {
        Self {
            open: Mutex::new(Open {
                waiting: HashMap::new(),
                last_ticket: 0,
                lost: HashSet::new(),
                over: false,
            }),
            answered: Condvar::new(),
        }
    }
}

impl<T> Questions<T> {
    /// Has `send` ask `slice`, with a ticket, and waits for the answer: `None` when
    /// none came within `patience`, or none will come.
    pub fn ask(&self, slice: usize, patience: Duration, send: impl FnOnce(u64)) -> Option<T> {
        let ticket = self.open(slice);
        send(ticket);
        self.wait(ticket, patience)
    }

    /// A ticket for a question that `slice` is about to be asked;
    /// [`Questions::wait`] ends it.
    pub fn open(&self, slice: usize) -> u64 {
        let mut open = self.lock();
        open.last_ticket += 1;
        let ticket = open.last_ticket;
        open.waiting.insert(ticket, (slice, None));
        ticket
    }

    /// Waits for the answer: `None` when none came within `patience`, or none will.
    pub fn wait(&self, ticket: u64, patience: Duration) -> Option<T> {
        let (mut open, _) =
            self.answered
                .wait_timeout_while(self.lock(), patience, |open| {
                    let unanswered = open.waiting.get(&ticket).is_some_and(|(slice, answer)| {
                        answer.is_none() && !open.lost.contains(slice)
                    });
                    !open.over && unanswered
                })
                .unwrap_or_else(PoisonError::into_inner);
        open.waiting.remove(&ticket).and_then(|(_, answer)| answer)
    }

    /// The answer came. One that nobody waits for any more is dropped.
    pub fn answer(&self, ticket: u64, answer: T) {
        if let Some((_, place)) = self.lock().waiting.get_mut(&ticket) {
            *place = Some(answer);
        }
        self.answered.notify_all();
    }

    /// `slice` answers nothing any more: who waits for it goes on.
    pub fn lose(&self, slice: usize) {
        self.lock().lost.insert(slice);
        self.answered.notify_all();
    }

    /// No more replies: waiting threads continue.
    pub fn end(&self) {
        self.lock().over = true;
        self.answered.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Open<T>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn every_question_gets_its_own_answer() {
        let questions = Arc::<Questions<u64>>::default();
        let (send, tickets) = channel();
        let askers: Vec<_> = (0..4)
            .map(|_| {
                let (questions, send) = (questions.clone(), send.clone());
                std::thread::spawn(move || {
                    for _ in 0..500 {
                        let mut mine = 0;
                        let answer = questions.ask(1, Duration::from_secs(20), |ticket| {
                            mine = ticket;
                            send.send(ticket).unwrap();
                        });
                        assert_eq!(answer, Some(mine * 3));
                    }
                })
            })
            .collect();
        drop(send);
        for ticket in tickets {
            questions.answer(ticket, ticket * 3);
        }
        for asker in askers {
            asker.join().unwrap();
        }
    }

    #[test]
    fn a_lost_slice_is_not_waited_for() {
        let questions = Arc::<Questions<u8>>::default();
        let (lost, alive) = (questions.open(1), questions.open(2));
        let waiting = {
            let questions = questions.clone();
            std::thread::spawn(move || questions.wait(lost, Duration::from_secs(100)))
        };
        questions.lose(1);
        assert_eq!(waiting.join().unwrap(), None);
        assert_eq!(questions.ask(1, Duration::from_secs(100), |_| {}), None);
        questions.answer(alive, 7);
        assert_eq!(questions.wait(alive, Duration::from_secs(100)), Some(7));
    }

    #[test]
    fn no_answer_is_an_answer_in_time() {
        let questions = Questions::<u8>::default();
        assert_eq!(questions.ask(1, Duration::from_millis(5), |_| {}), None);
        questions.answer(1, 1);
        questions.end();
        assert_eq!(questions.ask(1, Duration::from_secs(100), |_| {}), None);
    }
}
