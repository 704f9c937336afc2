//! The report in a real browser: nothing may stick out of a phone's or a desk's window. Needs chromium; without it the test says so and ends.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tilewright_bench::load::mix::Mix;
use tilewright_bench::load::record::{Mode, Run, Server};
use tilewright_bench::load::report::html as load_html;
use tilewright_bench::load::session::{self, Options};
use tilewright_bench::record::Record;
use tilewright_bench::report::html;

mod support;

fn browser() -> Option<&'static str> {
    let candidates = ["chromium", "chromium-browser", "google-chrome"];
    candidates.into_iter().find(|name| tilewright_bench::machine::find_program(name).is_some())
}

#[test]
fn the_report_fits_a_phone_and_a_desk() {
    let Some(browser) = browser() else {
        eprintln!("NOT TESTED: the report in a browser; no chromium here (Debian: apt-get install chromium)");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/records");
    let records: Vec<(String, Record)> =
        ["20261130T091558Z-isa-levels-screen.json", "20261130T091243Z-two-programs-screen.json"]
            .map(|name| (name.to_owned(), Record::read(&root.join(name)).unwrap()))
            .into();
    fits(browser, &html(&records), 4);
}

#[test]
fn the_report_of_a_load_session_fits_a_phone_and_a_desk() {
    let Some(browser) = browser() else {
        eprintln!("NOT TESTED: the report of a load session in a browser; no chromium here");
        return;
    };
    let quick = support::serve(|_| (200, String::new()));
    let slow = support::serve(|_| {
        std::thread::sleep(Duration::from_millis(5));
        (200, String::new())
    });
    let named = |name: &str, url: &str| Server { name: name.to_owned(), url: url.to_owned() };
    let both = vec![named("a-server-with-a-very-long-name-that-does-not-break", &quick), named("b", &slow)];
    let options = Options {
        command: format!("tilewright bench load {}", "x".repeat(300)),
        servers: both.clone(),
        headers: String::new(),
        mode: Mode::Compare,
        rate: Some(200.0),
        closed: None,
        seconds: 0.2,
        warm_up: 0.0,
        connections: 8,
        timeout: 5.0,
        seed: 1,
        pairs: 8,
        p99_ms: None,
        at: Some(0.7),
    };
    let mix = Mix::parse(b"{}", Path::new("m")).unwrap();
    let run = |options: &Options| session::run(&mix, options, &AtomicBool::new(false), &mut |_: &Run, _| {}).unwrap();
    let sweep = Options { servers: both[..1].to_vec(), mode: Mode::Sweep, rate: Some(2000.0), ..options.clone() };
    fits(browser, &load_html("x.json", &run(&options)), 3);
    fits(browser, &load_html("x.json", &run(&sweep)), 4);
}

/// Opens a page at two widths: nothing may stick out, and so many plots must be drawn.
fn fits(browser: &str, page: &str, plots: i64) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("report.html"), page).unwrap();
    // A window of a browser without a screen has a least width, a frame has none.
    let probe = r#"<!DOCTYPE html><body><script>
        let text = "";
        for (const width of [390, 1280]) {
            const frame = document.createElement("iframe");
            frame.width = width; frame.height = 900; frame.src = "report.html";
            frame.onload = () => {
                const page = frame.contentDocument, view = frame.contentWindow;
                const drawn = [...page.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().height > 40).length;
                const small = [...page.querySelectorAll("svg text, td, p, li")].filter(e => e.getBoundingClientRect().right > width + 1).length;
                text += `width=${width} scroll=${page.documentElement.scrollWidth} inner=${page.documentElement.clientWidth} drawn=${drawn} outside=${small};`;
                document.body.dataset.result = text;
            };
            document.body.append(frame);
        }
        </script></body>"#;
    std::fs::write(folder.path().join("probe.html"), probe).unwrap();
    let mut command = Command::new(browser);
    command.args([
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=5000",
    ]);
    command.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
    command.arg("--dump-dom").arg(format!("file://{}", folder.path().join("probe.html").display()));
    let file = std::fs::File::create(folder.path().join("dom")).unwrap();
    let mut child = command.stdout(Stdio::from(file)).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            let _ = child.kill();
            panic!("{browser} did not end in a minute");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let dom = std::fs::read_to_string(folder.path().join("dom")).unwrap();
    for width in [390, 1280] {
        let start = dom.find(&format!("width={width} ")).unwrap_or_else(|| panic!("no result in {dom}"));
        let line = dom[start..].split(';').next().unwrap();
        let value = |key: &str| -> i64 {
            let word = line.split(' ').find_map(|w| w.strip_prefix(key)).unwrap();
            word.trim_start_matches('=').parse().unwrap()
        };
        assert!(value("scroll") <= value("inner"), "the page must not scroll sideways: {line}");
        assert_eq!(value("outside"), 0, "{line}");
        assert!(value("drawn") >= plots, "every plot is drawn: {line}");
    }
}
