//! The panel at the bottom of the terminal.
//!
//! Each frame is one `write`, which the terminal takes whole: cursor saved,
//! panel drawn, cursor restored. So the program's own output is never cut into.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU32, Ordering};

use ratatui::backend::CrosstermBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Gauge, Paragraph, Sparkline};
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use weft_node::report::{AggregateView, NodeState, NodeView};
use weft_node::size::{format_bytes, format_pages};

use super::rates::Rates;
use crate::summary::{count, format_seconds};

/// Rows that the program keeps at least.
const PROGRAM_ROWS_MIN: u16 = 6;
/// Columns without which the panel makes no sense.
const COLUMNS_MIN: u16 = 60;
/// Title, headings and the line for messages.
const FIXED_ROWS: u16 = 3;

/// Rows of the panel that is open now, for the panic hook; 0 when none is.
static OPEN_ROWS: AtomicU32 = AtomicU32::new(0);

/// Collects a frame and writes it at once.
struct FrameWriter {
    bytes: Vec<u8>,
}

impl Write for FrameWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let mut frame = b"\x1b7\x1b[?25l".to_vec();
        frame.append(&mut self.bytes);
        frame.extend_from_slice(b"\x1b8\x1b[?25h");
        io::stderr().write_all(&frame)
    }
}

/// See the module.
pub struct Panel {
    terminal: Terminal<CrosstermBackend<FrameWriter>>,
    size: (u16, u16),
    rows: u16,
}

impl Panel {
    /// Takes the bottom rows for a panel of `nodes` nodes; `None` when the
    /// terminal is too small for it.
    pub fn open(nodes: usize) -> Option<Panel> {
        let rows = FIXED_ROWS + nodes as u16;
        let size = crossterm::terminal::size().ok()?;
        if size.0 < COLUMNS_MIN || size.1 < rows + PROGRAM_ROWS_MIN {
            return None;
        }
        restore_on_panic();
        let panel = Panel {
            terminal: terminal(size, rows)?,
            size,
            rows,
        };
        OPEN_ROWS.store(rows.into(), Ordering::Release);
        panel.take_rows();
        Some(panel)
    }

    /// Scrolls the bottom rows free and closes them to scrolling.
    fn take_rows(&self) {
        let (rows, left) = (self.rows, self.size.1 - self.rows);
        let feed = "\n".repeat(rows.into());
        // The region's setting moves the cursor, hence saved and restored.
        put(&format!("{feed}\x1b[{rows}A\x1b7\x1b[1;{left}r\x1b8"));
    }

    /// Draws one frame, unless this process is in the background.
    pub fn draw(&mut self, view: &AggregateView, rates: &Rates, message: Option<&str>) {
        if !in_foreground() {
            return;
        }
        self.follow_size();
        // A terminal that has gone ends the program by itself (hang-up).
        let _ = self
            .terminal
            .draw(|frame| render(frame, view, rates, message));
    }

    fn follow_size(&mut self) {
        let Ok(size) = crossterm::terminal::size() else {
            return;
        };
        if size == self.size || size.1 < self.rows + PROGRAM_ROWS_MIN {
            return;
        }
        if let Some(terminal) = terminal(size, self.rows) {
            put("\x1b7\x1b[r\x1b[J\x1b8");
            self.size = size;
            self.terminal = terminal;
            self.take_rows();
        }
    }
}

impl Drop for Panel {
    fn drop(&mut self) {
        // Cursor kept where the program left it, everything below cleared.
        restore();
    }
}

fn terminal(size: (u16, u16), rows: u16) -> Option<Terminal<CrosstermBackend<FrameWriter>>> {
    let area = Rect::new(0, size.1 - rows, size.0, rows);
    let options = TerminalOptions {
        viewport: Viewport::Fixed(area),
    };
    let writer = FrameWriter { bytes: Vec::new() };
    Terminal::with_options(CrosstermBackend::new(writer), options).ok()
}

fn put(text: &str) {
    // Nowhere to draw is no reason to stop the program.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Gives the whole screen back to scrolling.
fn restore() {
    if OPEN_ROWS.swap(0, Ordering::AcqRel) != 0 {
        put("\x1b7\x1b[r\x1b8\x1b[J\x1b[?25h\x1b[0m");
    }
}

fn restore_on_panic() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            before(info);
        }));
    });
}

fn in_foreground() -> bool {
    // SAFETY: integers only; -1 when standard error is no terminal of ours.
    unsafe { libc::tcgetpgrp(2) == libc::getpgrp() }
}

fn render(frame: &mut Frame<'_>, view: &AggregateView, rates: &Rates, message: Option<&str>) {
    let area = frame.area();
    let block = Block::new().borders(Borders::TOP).title(title(view));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let rows = Layout::vertical(vec![Constraint::Length(1); inner.height.into()]).split(inner);
    let Some((headings, rows)) = rows.split_first() else {
        return;
    };
    render_headings(frame, *headings);
    for (index, (node, row)) in view.nodes.iter().zip(rows).enumerate() {
        let executing = view.stretched && node.node == view.executing_node;
        render_node(frame, *row, node, executing, rates, index);
    }
    if let (Some(row), Some(text)) = (rows.get(view.nodes.len()), message) {
        let style = Style::new().fg(Color::Yellow);
        frame.render_widget(Paragraph::new(Span::styled(text, style)), *row);
    }
}

fn title(view: &AggregateView) -> Line<'static> {
    let command = view.command.first().cloned().unwrap_or_default();
    let state = if view.stretched {
        "stretched"
    } else {
        "not stretched"
    };
    Line::from(vec![
        Span::styled(" weft ", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!(
            "{command} · {} · {state} · the program's output scrolls above ",
            format_seconds(view.wall_time_s)
        )),
    ])
}

fn columns(row: Rect) -> std::rc::Rc<[Rect]> {
    Layout::horizontal([
        Constraint::Length(14),
        Constraint::Fill(3),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(11),
        Constraint::Fill(1),
        Constraint::Length(11),
        Constraint::Fill(1),
    ])
    .spacing(1)
    .split(row)
}

fn render_headings(frame: &mut Frame<'_>, row: Rect) {
    let names = [
        "node",
        "resident",
        "pulls/s",
        "pushes/s",
        "jumps/s",
        "sent/s",
        "",
        "received/s",
    ];
    let style = Style::new().add_modifier(Modifier::DIM);
    for ((index, name), area) in names.iter().enumerate().zip(columns(row).iter()) {
        let text = Paragraph::new(Span::styled(*name, style));
        frame.render_widget(
            if index >= 2 {
                text.right_aligned()
            } else {
                text
            },
            *area,
        );
    }
}

fn render_node(
    frame: &mut Frame<'_>,
    row: Rect,
    node: &NodeView,
    executing: bool,
    rates: &Rates,
    index: usize,
) {
    let columns = columns(row);
    let (mark, style) = match node.state {
        NodeState::Running if executing => ("▶ ", Style::new().fg(Color::Green)),
        NodeState::Running => ("  ", Style::new()),
        NodeState::Left => ("- ", Style::new().add_modifier(Modifier::DIM)),
        NodeState::Lost => ("✗ ", Style::new().fg(Color::Red)),
    };
    let name = Span::styled(format!("{mark}{}", node.name), style);
    frame.render_widget(Paragraph::new(name), columns[0]);
    frame.render_widget(resident(node), columns[1]);
    let rate = rates.node(index);
    let numbers = [
        (2, count(rate.pulls as u64)),
        (3, count(rate.pushes as u64)),
        (4, count(rate.jumps as u64)),
        (5, format_bytes(rate.sent_bytes as u64)),
        (7, format_bytes(rate.received_bytes as u64)),
    ];
    for (column, text) in numbers {
        frame.render_widget(Paragraph::new(text).right_aligned(), columns[column]);
    }
    let width = columns[6].width.max(columns[8].width);
    let (sent, received) = rates.history(index, width.into());
    for (column, data) in [(6, sent), (8, received)] {
        let spark = Sparkline::default()
            .data(data)
            .style(Style::new().fg(Color::Cyan));
        frame.render_widget(spark, columns[column]);
    }
}

fn resident(node: &NodeView) -> Gauge<'static> {
    let pages = node.counters.resident_pages;
    let full = pages as f64 / node.budget_pages.max(1) as f64;
    let colour = if full > 0.95 {
        Color::Yellow
    } else {
        Color::Blue
    };
    let label = format!(
        "{} / {}",
        format_pages(pages),
        format_pages(node.budget_pages)
    );
    Gauge::default()
        .ratio(full.clamp(0.0, 1.0))
        .label(label)
        .gauge_style(Style::new().fg(colour).bg(Color::DarkGray))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::backend::TestBackend;
    use weft_node::report::FORMAT;
    use weft_node::shared::Snapshot;

    #[test]
    fn a_frame_shows_every_node_and_the_message() {
        let node = |node, name: &str| NodeView {
            node,
            name: name.into(),
            state: NodeState::Running,
            pid: None,
            budget_pages: 16384,
            owned_pages: None,
            counters: Snapshot {
                resident_pages: 8192,
                ..Snapshot::default()
            },
        };
        let view = AggregateView {
            format: FORMAT,
            pid: 1,
            program_pid: 1,
            command: vec!["sort".into()],
            wall_time_s: 3.0,
            generation: 0,
            stretched: true,
            executing_node: 1,
            nodes: vec![node(0, "home"), node(1, "alpha")],
        };
        let mut terminal = Terminal::new(TestBackend::new(110, 5)).unwrap();
        terminal
            .draw(|frame| render(frame, &view, &Rates::default(), Some("a word")))
            .unwrap();
        let text: String = terminal
            .backend()
            .buffer()
            .content
            .iter()
            .map(|c| c.symbol())
            .collect();
        for part in [
            "sort",
            "▶ alpha",
            "  home",
            "32.0 MiB / 64.0 MiB",
            "pulls/s",
            "a word",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
