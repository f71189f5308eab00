//! The runs over time as a picture (SVG): cores in use, requests that wait, aggregates on
//! several hosts, a line for each policy.

use crate::outcome::{Outcome, Sample};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const PANEL: f64 = 190.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const GAP: f64 = 50.0;
const LEGEND_LINE: f64 = 18.0;

/// Okabe and Ito's colours, which the colour-blind can tell apart; the dashes differ, too.
const STYLES: [(&str, &str); 8] = [
    ("#000000", "none"),
    ("#e69f00", "8 3"),
    ("#56b4e9", "none"),
    ("#009e73", "2 2"),
    ("#0072b2", "10 3 2 3"),
    ("#d55e00", "none"),
    ("#cc79a7", "4 4"),
    ("#888888", "1 3"),
];

/// One panel: its title, and what it shows of a sample.
type Panel = (&'static str, fn(&Sample) -> f64);

const PANELS: [Panel; 3] = [
    ("cores in use, % of all", |sample| sample.used_percent),
    ("requests that wait", |sample| sample.waiting as f64),
    ("aggregates on several hosts", |sample| sample.spread as f64),
];

pub fn render(title: &str, outcomes: &[Outcome]) -> String {
    let legend = TOP + PANELS.len() as f64 * (PANEL + GAP);
    let height = legend + outcomes.len() as f64 * LEGEND_LINE + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{title}</text>\n"
    );
    let samples = outcomes.iter().flat_map(|outcome| &outcome.samples);
    let hours = samples.map(|sample| sample.at_s).fold(0.0, f64::max) / 3600.0;
    for (number, panel) in PANELS.iter().enumerate() {
        let top = TOP + number as f64 * (PANEL + GAP);
        draw_panel(&mut svg, panel, top, hours, outcomes);
    }
    for (number, outcome) in outcomes.iter().enumerate() {
        let (colour, dashes) = STYLES[number % STYLES.len()];
        let y = legend + number as f64 * LEGEND_LINE;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" \
             stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            LEFT + 40.0,
            LEFT + 50.0,
            y + 4.0,
            outcome.policy
        );
    }
    svg + "</svg>\n"
}

fn draw_panel(svg: &mut String, panel: &Panel, top: f64, hours: f64, outcomes: &[Outcome]) {
    let &(title, value) = panel;
    let samples = || outcomes.iter().flat_map(|outcome| &outcome.samples);
    let most = round_up(samples().map(value).fold(1.0, f64::max));
    let bottom = top + PANEL;
    let wide = WIDTH - LEFT - RIGHT;
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{}\">{title}</text>", top - 4.0);
    for fifth in 0..=4 {
        let share = f64::from(fifth) / 4.0;
        let y = bottom - share * PANEL;
        let x = LEFT + share * wide;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{:.1} h</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            share * most,
            bottom + 16.0,
            share * hours,
        );
    }
    for (number, outcome) in outcomes.iter().enumerate() {
        let (colour, dashes) = STYLES[number % STYLES.len()];
        let mut points = String::new();
        for sample in &outcome.samples {
            let x = LEFT + sample.at_s / 3600.0 / hours.max(1e-9) * wide;
            let y = bottom - value(sample) / most * PANEL;
            let _ = write!(points, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" \
             stroke-dasharray=\"{dashes}\" points=\"{}\"/>",
            points.trim_end()
        );
    }
}

/// The next larger of 1, 2, 4, 10, 20, 40, 100, …: quarters of it are round numbers.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let factors = [1.0, 2.0, 4.0, 10.0];
    factors
        .iter()
        .map(|factor| factor * power)
        .find(|&round| round >= value)
        .unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, round) in [
            (1.0, 1.0),
            (1.1, 2.0),
            (39.0, 40.0),
            (41.0, 100.0),
            (100.0, 100.0),
        ] {
            assert_eq!(round_up(value), round);
        }
    }
}
