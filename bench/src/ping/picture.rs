//! Pictures of the requests: how long each answer took, on a logarithmic scale, and when the
//! machine moved.

use super::{Ping, Step, Track};

/// Decades of the scale: from 0.01 ms to 1 s.
const DECADES: i32 = 5;
const LEAST_MS: f64 = 0.01;

/// Where a time lies on the scale, 0 to 1.
fn height(milliseconds: f64) -> f64 {
    ((milliseconds / LEAST_MS).log10() / f64::from(DECADES)).clamp(0.0, 1.0)
}

fn taken_ms(ping: &Ping) -> Option<f64> {
    ping.answered_s
        .map(|answered_s| (answered_s - ping.sent_s) * 1e3)
}

fn decade_name(decade: i32) -> String {
    let milliseconds = LEAST_MS * 10_f64.powi(decade);
    match milliseconds >= 1000.0 {
        true => format!("{} s", milliseconds / 1000.0),
        false => format!("{} ms", (milliseconds * 1000.0).round() / 1000.0),
    }
}

/// For a terminal: each column is the longest answer of a piece of time, `×` a lost one.
pub fn text(track: &Track) -> String {
    const COLUMNS: usize = 96;
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (first, last) = track.span_s();
    let piece_s = (last - first).max(1e-9) / COLUMNS as f64;
    let column = |at_s: f64| (((at_s - first) / piece_s) as usize).min(COLUMNS - 1);
    let mut tallest = [0.0_f64; COLUMNS];
    let mut is_lost = [false; COLUMNS];
    for ping in &track.pings {
        let at = column(ping.sent_s);
        match taken_ms(ping) {
            Some(taken) => tallest[at] = tallest[at].max(height(taken)),
            None => is_lost[at] = true,
        }
    }
    let mut text = String::new();
    for decade in (0..DECADES).rev() {
        text += &format!("{:>7} ┤", decade_name(decade));
        for at in 0..COLUMNS {
            let eighths = (tallest[at] * f64::from(DECADES) - f64::from(decade)) * 8.0;
            let level = eighths.clamp(0.0, 8.0).round() as usize;
            let is_top = decade == DECADES - 1;
            text.push(match is_lost[at] && is_top {
                true => '×',
                false => LEVELS[level],
            });
        }
        text.push('\n');
    }
    let mut below = [' '; COLUMNS];
    for (number, step) in (1..).zip(&track.steps) {
        let (from, until) = (column(step.from_s), column(step.until_s));
        below[from..=until].fill('─');
        below[from] = char::from_digit(number % 10, 10).unwrap_or('?');
    }
    let below: String = below.iter().collect();
    let seconds = format!("{:.1} s", last - first);
    text += &format!("{:>7} │{}\n", "steps", below.trim_end());
    text += &format!("{:>9}0 s{:>width$}\n", "", seconds, width = COLUMNS - 3);
    text
}

/// The same for a browser: a dot for each answer, a red line for a lost one.
pub fn svg(track: &Track) -> String {
    let worst = |step: &Step| {
        let worst = track.worst(step.from_s, step.until_s);
        let gap_ms = worst.gap_s * 1e3;
        format!("gap {gap_ms:.1} ms, {} of {} lost", worst.lost, worst.sent)
    };
    draw(track, "time until the answer of each ping", &worst)
}

/// A picture that says this, and of each step what was worst.
pub fn draw(track: &Track, title: &str, worst: &dyn Fn(&Step) -> String) -> String {
    Sheet::new(track).draw(track, title, worst)
}

const WIDTH: f64 = 1040.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 1024.0;
const TOP: f64 = 96.0;
const BOTTOM: f64 = 330.0;
const TOTAL_HEIGHT: f64 = 372.0;

/// Where things are on the page.
struct Sheet {
    first_s: f64,
    per_second: f64,
}

impl Sheet {
    fn new(track: &Track) -> Sheet {
        let (first_s, last_s) = track.span_s();
        Sheet {
            first_s,
            per_second: (RIGHT - LEFT) / (last_s - first_s).max(1e-9),
        }
    }

    fn x(&self, at_s: f64) -> f64 {
        LEFT + (at_s - self.first_s) * self.per_second
    }

    fn draw(&self, track: &Track, title: &str, worst: &dyn Fn(&Step) -> String) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {TOTAL_HEIGHT}\" width=\"{WIDTH}\" font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\">\n<title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{TOTAL_HEIGHT}\" rx=\"8\" fill=\"#ffffff\"/>\n"
        );
        svg += &label(16.0, 26.0, "start", title);
        svg += &self.steps(track, worst);
        svg += &self.axes(track);
        svg + &self.dots(track) + "</svg>\n"
    }

    /// A band for each step, its name above it and its worst beneath that.
    fn steps(&self, track: &Track, worst: &dyn Fn(&Step) -> String) -> String {
        let mut svg = String::new();
        for step in &track.steps {
            let (from, until) = (self.x(step.from_s), self.x(step.until_s));
            svg += &format!(
                "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#dbe9f9\"/>\n",
                (until - from).max(1.0),
                BOTTOM - TOP
            );
            let lines = [(50.0, &step.name), (67.0, &step.note), (84.0, &worst(step))];
            for (y, line) in lines {
                svg += &label(from, y, "start", line);
            }
        }
        svg
    }

    fn axes(&self, track: &Track) -> String {
        let mut svg = String::new();
        for decade in 0..=DECADES {
            let y = BOTTOM - (BOTTOM - TOP) * f64::from(decade) / f64::from(DECADES);
            svg += &format!(
                "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#d0d7de\" stroke-width=\"1\"/>\n"
            );
            svg += &label(LEFT - 8.0, y + 4.0, "end", &decade_name(decade));
        }
        let (first_s, last_s) = track.span_s();
        for second in 0..=((last_s - first_s) as u32) {
            let x = self.x(first_s + f64::from(second));
            svg += &label(x, BOTTOM + 18.0, "middle", &second.to_string());
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        svg + &label(middle, BOTTOM + 36.0, "middle", "seconds")
    }

    /// Two paths: a line of no length with round ends is a dot, in few bytes.
    fn dots(&self, track: &Track) -> String {
        let (mut dots, mut lost) = (String::new(), String::new());
        for ping in &track.pings {
            let x = self.x(ping.sent_s);
            match taken_ms(ping) {
                Some(taken) => {
                    let y = BOTTOM - (BOTTOM - TOP) * height(taken);
                    dots += &format!("M{x:.1} {y:.1}h0");
                }
                None => lost += &format!("M{x:.1} {TOP}V{BOTTOM}"),
            }
        }
        format!(
            "<path d=\"{lost}\" stroke=\"#cf222e\"/>\n<path d=\"{dots}\" stroke=\"#0550ae\" stroke-width=\"3.2\" stroke-linecap=\"round\"/>\n"
        )
    }
}

fn label(x: f64, y: f64, anchor: &str, text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#24292f\">{escaped}</text>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::track::tests::example;
    use super::*;

    #[test]
    fn the_scale_is_logarithmic_and_bounded() {
        assert!((height(0.01)).abs() < 1e-9);
        assert!((height(1.0) - 0.4).abs() < 1e-9);
        assert!((height(1e9) - 1.0).abs() < 1e-9);
        assert!(height(0.0).abs() < 1e-9);
        assert_eq!(decade_name(0), "0.01 ms");
        assert_eq!(decade_name(5), "1 s");
    }

    #[test]
    fn a_terminal_shows_what_was_slow_and_what_was_lost() {
        let text = text(&example());
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows.len(), DECADES as usize + 2);
        assert_eq!(rows[0].matches('×').count(), 1, "{text}");
        // 10 ms and more: the ten requests that waited, in ten columns or so.
        let slow = rows[1].chars().filter(|c| ('▁'..='█').contains(c)).count();
        assert!((8..=11).contains(&slow), "{slow} columns\n{text}");
        assert!(rows[5].contains("1──"), "{text}");
    }

    #[test]
    fn a_picture_has_all_answers_and_names_the_steps() {
        let svg = svg(&example());
        assert_eq!(svg.matches("h0").count(), 99);
        assert_eq!(svg.matches("V330").count(), 1);
        assert!(svg.contains("moves &lt;there>"), "a name is escaped");
        assert!(svg.contains("gap 109.8 ms, 0 of 20 lost"));
    }

    #[test]
    fn nothing_makes_an_empty_picture() {
        let track = Track::default();
        assert!(!svg(&track).contains("h0"));
        assert!(text(&track).contains("0.0 s"));
    }
}
