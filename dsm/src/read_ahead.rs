//! Recognises sequential faults and says how far to read ahead of them.
//!
//! A stream is the page after the last one that was asked for (`until`) and a
//! window. A fault at `until` continues the stream: the window doubles. A fault
//! on a page that was asked for but is still on its way means that the program
//! is as fast as the link: the next window is asked for at once, so that the
//! link never idles.

const STREAMS: usize = 8;
/// Pages of the first window of a stream.
const WINDOW_FIRST: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// First page of the last window.
    start: u64,
    /// First page that was not asked for.
    until: u64,
    window: u64,
    /// Pages asked for ahead of faults and not passed yet.
    asked: u64,
    used: u64,
}

/// What to do besides fetching the page itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// First page to ask for.
    pub from: u64,
    /// Pages to ask for.
    pub count: u64,
    /// Pages that were asked for earlier and that the program has passed since
    /// without a fault: read ahead and used.
    pub passed: u64,
}

impl Ahead {
    const fn none(page: u64) -> Ahead {
        Ahead {
            from: page + 1,
            count: 0,
            passed: 0,
        }
    }
}

/// The last few streams of one node.
#[derive(Debug)]
pub struct Streams {
    streams: [Stream; STREAMS],
    clock: u64,
    window_max: u64,
}

impl Streams {
    /// `window_max` pages at most; 0 never reads ahead.
    pub fn new(window_max: u64) -> Streams {
        Streams {
            streams: [Stream::default(); STREAMS],
            clock: 0,
            window_max,
        }
    }

    /// A fault on `page` that is elsewhere, or on its way.
    pub fn fault(&mut self, page: u64) -> Ahead {
        if self.window_max == 0 {
            return Ahead::none(page);
        }
        self.clock += 1;
        let clock = self.clock;
        let window_max = self.window_max;
        let found = self
            .streams
            .iter_mut()
            .find(|s| s.used != 0 && s.start <= page && page <= s.until);
        if let Some(stream) = found {
            stream.used = clock;
            stream.window = (stream.window * 2).clamp(WINDOW_FIRST, window_max.max(WINDOW_FIRST));
            stream.window = stream.window.min(window_max);
            let from = stream.until.max(page + 1);
            let goal = page + 1 + stream.window;
            // Those before the faulting page, and it, if it is on its way.
            let passed = page.min(stream.until) - stream.start;
            let passed = passed - u64::from(page == stream.until && passed > 0);
            let passed = passed.min(stream.asked);
            stream.asked -= passed;
            stream.start = page;
            stream.until = goal.max(from);
            return Ahead {
                from,
                count: stream.until - from,
                passed,
            };
        }
        if let Some(oldest) = self.streams.iter_mut().min_by_key(|s| s.used) {
            *oldest = Stream {
                start: page,
                until: page + 1,
                window: 0,
                asked: 0,
                used: clock,
            };
        }
        Ahead::none(page)
    }

    /// So many of the pages of the last [`Ahead`] were really asked for.
    pub fn asked(&mut self, pages: u64) {
        if let Some(stream) = self.streams.iter_mut().max_by_key(|s| s.used) {
            stream.asked += pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_fault_asks_for_nothing() {
        let mut streams = Streams::new(64);
        for page in [100, 900, 300] {
            assert_eq!(streams.fault(page).count, 0);
        }
    }

    #[test]
    fn the_window_doubles_up_to_its_maximum() {
        let mut streams = Streams::new(64);
        let mut page = 1000;
        let mut counts = vec![];
        for _ in 0..6 {
            let ahead = streams.fault(page);
            assert_eq!(ahead.from, page + 1);
            counts.push(ahead.count);
            streams.asked(ahead.count);
            page = ahead.from + ahead.count;
        }
        assert_eq!(counts, [0, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn a_fault_inside_the_window_keeps_the_distance() {
        let mut streams = Streams::new(64);
        streams.fault(10);
        let first = streams.fault(11);
        assert_eq!((first.from, first.count), (12, 8));
        // Page 15 is on its way: the next window starts behind what was asked.
        let next = streams.fault(15);
        assert_eq!((next.from, next.count), (20, 12));
    }

    #[test]
    fn pages_passed_without_a_fault_were_used() {
        let mut streams = Streams::new(64);
        streams.fault(10);
        let ahead = streams.fault(11);
        streams.asked(ahead.count);
        let next = streams.fault(ahead.from + ahead.count);
        assert_eq!(next.passed, ahead.count);
    }

    #[test]
    fn several_streams_go_on_side_by_side() {
        let mut streams = Streams::new(64);
        for base in [1000, 5000, 9000] {
            streams.fault(base);
        }
        for base in [1000, 5000, 9000] {
            assert_eq!(streams.fault(base + 1).count, 8);
        }
    }

    #[test]
    fn zero_turns_it_off() {
        let mut streams = Streams::new(0);
        for page in 0..100 {
            assert_eq!(streams.fault(page).count, 0);
        }
    }
}
