//! Finds sequential faults and says how far to read ahead.
//!
//! A stream is a page expected next and a direction. A fault at the expected
//! page continues its stream: the window doubles, up to the configured most. A
//! fault right beside the last fault of a stream that never went on turns into a
//! stream in that direction. Any other fault replaces the stream that was not
//! used for longest.
//!
//! Invariant: a window is 0 (not sequential yet) or between the configured
//! first and most, and never crosses page 0 or the last page.

use crate::types::{CHUNK_PAGES, PAGES_MAX, Page};

/// Streams that are followed at once.
pub const STREAMS: usize = 8;

/// How far to read ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadAheadConfig {
    /// Window of a stream that was just found, pages.
    pub first_pages: u16,
    /// Largest window, pages; at most a chunk.
    pub most_pages: u16,
    /// Follow descending streams too.
    pub descending: bool,
}

impl Default for ReadAheadConfig {
    fn default() -> ReadAheadConfig {
        ReadAheadConfig {
            first_pages: 8,
            most_pages: CHUNK_PAGES as u16,
            descending: true,
        }
    }
}

/// Which pages to ask for beside the faulting one: `count` of them, the next
/// ones up, or down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// How many pages; 0 for none.
    pub count: u16,
    /// Below the faulting page instead of above it.
    pub descending: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The page whose fault would continue the stream.
    next: u64,
    /// The page that faulted last.
    last: u64,
    window: u16,
    descending: bool,
    /// When it was used last; 0 for never.
    used: u32,
}

/// The detector. About 300 bytes; no allocation.
#[derive(Debug, Clone)]
pub struct ReadAhead {
    config: ReadAheadConfig,
    streams: [Stream; STREAMS],
    clock: u32,
    /// Halves windows while pages go unused: most = configured >> penalty.
    penalty: u8,
}

impl ReadAhead {
    /// A detector that knows no stream. `first_pages` and `most_pages` are
    /// brought into `1..=512` and into order.
    pub const fn new(config: ReadAheadConfig) -> ReadAhead {
        let mut config = config;
        if config.most_pages as u64 > CHUNK_PAGES {
            config.most_pages = CHUNK_PAGES as u16;
        }
        if config.most_pages == 0 {
            config.most_pages = 1;
        }
        if config.first_pages == 0 {
            config.first_pages = 1;
        }
        if config.first_pages > config.most_pages {
            config.first_pages = config.most_pages;
        }
        ReadAhead {
            config,
            streams: [Stream {
                next: 0,
                last: 0,
                window: 0,
                descending: false,
                used: 0,
            }; STREAMS],
            clock: 0,
            penalty: 0,
        }
    }

    /// Notes a fault on a page that is elsewhere; says how many pages beside it
    /// to ask for.
    pub fn fault(&mut self, page: Page) -> Window {
        let page = page.0;
        self.clock = self.clock.wrapping_add(1).max(1);
        let found = self
            .streams
            .iter()
            .position(|stream| stream.used != 0 && stream.continued_by(page, self.config));
        let index = found.unwrap_or_else(|| self.oldest());
        let most = (self.config.most_pages >> self.penalty).max(1);
        let first = self.config.first_pages.min(most);
        let stream = &mut self.streams[index];
        stream.used = self.clock;
        if found.is_none() {
            *stream = Stream {
                next: page.wrapping_add(1),
                last: page,
                used: self.clock,
                ..Stream::default()
            };
            return Window {
                count: 0,
                descending: false,
            };
        }
        if stream.window == 0 {
            stream.descending = page < stream.last;
            stream.window = first;
        } else {
            stream.window = stream.window.saturating_mul(2).min(most).max(1);
        }
        stream.advance(page)
    }

    /// A page that was read ahead is touched for the first time: it was worth it.
    pub fn used(&mut self, pages: u32) {
        if pages > 0 {
            self.penalty = self.penalty.saturating_sub(1);
        }
    }

    /// Pages that were read ahead leave without having been touched, `unused`
    /// of `fetched`: when that is more than half, windows shrink.
    pub fn unused(&mut self, unused: u32, fetched: u32) {
        if u64::from(unused) * 2 > u64::from(fetched) {
            self.penalty = (self.penalty + 1).min(9);
        }
    }

    fn oldest(&self) -> usize {
        let mut oldest = 0;
        for (index, stream) in self.streams.iter().enumerate() {
            if stream.used < self.streams[oldest].used {
                oldest = index;
            }
        }
        oldest
    }
}

impl Stream {
    fn continued_by(&self, page: u64, config: ReadAheadConfig) -> bool {
        if self.window == 0 {
            let below = config.descending && page.wrapping_add(1) == self.last;
            return page == self.last + 1 || below;
        }
        // A fault inside the window means that a page of it was not delivered
        // (it was busy); the stream still goes on from there.
        let (low, high) = if self.descending {
            (self.next, self.last)
        } else {
            (self.last + 1, self.next + 1)
        };
        (low..high).contains(&page)
    }

    fn advance(&mut self, page: u64) -> Window {
        let room = if self.descending {
            page
        } else {
            PAGES_MAX.saturating_sub(page + 1)
        };
        let count = u64::from(self.window).min(room);
        self.last = page;
        self.next = if self.descending {
            page.saturating_sub(count + 1)
        } else {
            page + count + 1
        };
        Window {
            count: count as u16,
            descending: self.descending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(count: u16) -> Window {
        Window {
            count,
            descending: false,
        }
    }

    #[test]
    fn a_scan_doubles_its_window_up_to_a_chunk() {
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        let mut page = 1000;
        let mut windows = Vec::new();
        for _ in 0..10 {
            let window = detector.fault(Page(page));
            windows.push(window.count);
            page += u64::from(window.count) + 1;
        }
        assert_eq!(windows, [0, 8, 16, 32, 64, 128, 256, 512, 512, 512]);
    }

    #[test]
    fn descending_scans_are_followed_to_page_zero() {
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        assert_eq!(detector.fault(Page(30)).count, 0);
        let window = detector.fault(Page(29));
        assert_eq!((window.count, window.descending), (8, true));
        let window = detector.fault(Page(20));
        assert_eq!((window.count, window.descending), (16, true));
        let window = detector.fault(Page(3));
        assert_eq!((window.count, window.descending), (3, true));
        let ascending_only = ReadAheadConfig {
            descending: false,
            ..ReadAheadConfig::default()
        };
        let mut detector = ReadAhead::new(ascending_only);
        detector.fault(Page(30));
        assert_eq!(detector.fault(Page(29)).count, 0);
    }

    #[test]
    fn eight_interleaved_streams_and_no_random_one() {
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        for stream in 0..STREAMS as u64 {
            assert_eq!(detector.fault(Page(stream * 10_000 + 7)), up(0));
        }
        for stream in 0..STREAMS as u64 {
            assert_eq!(detector.fault(Page(stream * 10_000 + 8)), up(8));
        }
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        let mut asked = 0;
        for step in 0..1000u64 {
            asked += detector.fault(Page(step * 7919 % 1_000_003)).count;
        }
        assert_eq!(asked, 0);
    }

    #[test]
    fn unused_pages_shrink_the_window_and_used_ones_restore_it() {
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        for _ in 0..9 {
            detector.unused(6, 8);
        }
        detector.fault(Page(1));
        assert_eq!(detector.fault(Page(2)), up(1));
        for _ in 0..9 {
            detector.used(1);
        }
        assert_eq!(detector.fault(Page(4)), up(2));
        detector.unused(1, 8);
        assert_eq!(detector.fault(Page(7)), up(4));
    }

    #[test]
    fn a_fault_inside_the_window_goes_on_from_there() {
        let mut detector = ReadAhead::new(ReadAheadConfig::default());
        detector.fault(Page(10));
        assert_eq!(detector.fault(Page(11)), up(8));
        assert_eq!(detector.fault(Page(15)), up(16));
        let last = Page(PAGES_MAX - 1);
        detector.fault(Page(last.0 - 1));
        assert_eq!(detector.fault(last), up(0));
    }
}
