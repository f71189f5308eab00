//! Recognises sequential faults and says how far to read ahead of them.
//!
//! A stream is the page after the last one that was asked for (`until`) and a
//! window. A fault at `until` continues the stream: the window doubles. A fault
//! on a page that was asked for but is still on its way means that the program
//! is as fast as the link: the next window is asked for at once, so that the
//! link never idles.

const STREAMS: usize = 8;
/// First window, pages (DESIGN: 8 to 16 at first).
const WINDOW_FIRST: u64 = 8;

#[derive(Clone, Copy, Default)]
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
#[derive(Clone, Copy)]
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
            let passed = page.saturating_sub(stream.start + 1).min(stream.asked);
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
