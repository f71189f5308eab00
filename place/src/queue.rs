//! Requests that wait: those of a higher priority first, equal ones in the order of arrival.

use crate::decision::Delayed;
use crate::request::{AggregateId, Request};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

/// A request's place: smaller ones are served first.
pub type Place = (Reverse<u8>, u64);

struct Waiting {
    request: Request,
    /// Why it waits, as it was said last.
    told: Option<Delayed>,
}

#[derive(Default)]
pub struct Queue {
    waiting: BTreeMap<Place, Waiting>,
    places: BTreeMap<AggregateId, Place>,
    arrivals: u64,
}

impl Queue {
    pub fn push(&mut self, request: Request) -> Place {
        let place = (Reverse(request.priority), self.arrivals);
        self.arrivals += 1;
        self.places.insert(request.id, place);
        let told = None;
        self.waiting.insert(place, Waiting { request, told });
        place
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn contains(&self, id: AggregateId) -> bool {
        self.places.contains_key(&id)
    }

    /// Takes a request out; `None` where it does not wait.
    pub fn remove(&mut self, id: AggregateId) -> Option<Request> {
        let place = self.places.remove(&id)?;
        self.waiting.remove(&place).map(|waiting| waiting.request)
    }

    /// Panics where nothing waits at that place.
    pub fn at(&self, place: Place) -> &Request {
        &self.waiting[&place].request
    }

    /// All of them, the next one first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Request> {
        self.waiting.values().map(|waiting| &waiting.request)
    }

    /// The first one behind a place; the first of all for `None`.
    pub fn next(&self, behind: Option<Place>) -> Option<(Place, &Request)> {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.waiting.range((from, Bound::Unbounded)).next();
        next.map(|(&place, waiting)| (place, &waiting.request))
    }

    /// How many are served before that place.
    pub fn before(&self, place: Place) -> usize {
        match self.waiting.last_key_value() {
            Some((&last, _)) if last == place => self.waiting.len() - 1,
            _ => self.waiting.range(..place).count(),
        }
    }

    /// Notes why a request waits. `false`: that kind of reason was noted already, or nothing
    /// waits at that place.
    pub fn tell(&mut self, place: Place, why: &Delayed) -> bool {
        let Some(waiting) = self.waiting.get_mut(&place) else {
            return false;
        };
        let same = |told: &Delayed| std::mem::discriminant(told) == std::mem::discriminant(why);
        let new = !waiting.told.as_ref().is_some_and(same);
        if new {
            waiting.told = Some(why.clone());
        }
        new
    }

    /// Whether a request waits at that place, and nobody was told why.
    pub fn is_untold(&self, place: Place) -> bool {
        self.waiting
            .get(&place)
            .is_some_and(|waiting| waiting.told.is_none())
    }
}
