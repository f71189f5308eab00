//! Questions to other slices, and those who wait for the answers.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

struct Open<T> {
    /// By ticket: the answer, once it is there.
    waiting: HashMap<u64, Option<T>>,
    last_ticket: u64,
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
                over: false,
            }),
            answered: Condvar::new(),
        }
    }
}

impl<T> Questions<T> {
    /// Has `send` ask, with a ticket, and waits for the answer: `None` when none
    /// came within `patience`, or none will come.
    pub fn ask(&self, patience: Duration, send: impl FnOnce(u64)) -> Option<T> {
        let ticket = self.open();
        send(ticket);
        self.wait(ticket, patience)
    }

    /// A ticket for a question that is about to be asked; [`Questions::wait`] ends it.
    pub fn open(&self) -> u64 {
        let mut open = self.lock();
        open.last_ticket += 1;
        let ticket = open.last_ticket;
        open.waiting.insert(ticket, None);
        ticket
    }

    /// Waits for the answer: `None` when none came within `patience`, or none will.
    pub fn wait(&self, ticket: u64, patience: Duration) -> Option<T> {
        let (mut open, _) = self
            .answered
            .wait_timeout_while(self.lock(), patience, |open| {
                !open.over && open.waiting.get(&ticket).is_some_and(Option::is_none)
            })
            .unwrap_or_else(PoisonError::into_inner);
        open.waiting.remove(&ticket).flatten()
    }

    /// The answer came. One that nobody waits for any more is dropped.
    pub fn answer(&self, ticket: u64, answer: T) {
        if let Some(place) = self.lock().waiting.get_mut(&ticket) {
            *place = Some(answer);
        }
        self.answered.notify_all();
    }

    /// No more answers: whoever waits goes on.
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
                        let answer = questions.ask(Duration::from_secs(20), |ticket| {
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
    fn no_answer_is_an_answer_in_time() {
        let questions = Questions::<u8>::default();
        assert_eq!(questions.ask(Duration::from_millis(5), |_| {}), None);
        questions.answer(1, 1);
        questions.end();
        assert_eq!(questions.ask(Duration::from_secs(100), |_| {}), None);
    }
}
