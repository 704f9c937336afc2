//! Rests of a run, for computers that get hot: after each minute of work, or as long as a sensor says so.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_core::{Error, Result};

/// Seconds of work between two rests, and between two looks at a sensor.
const STRETCH: f64 = 60.0;
const LOOK: f64 = 1.0;
/// A rest ends so many degrees below the limit, and after so many seconds at the latest: a sensor may stay hot for reasons of its own.
const BELOW: f64 = 5.0;
const LONGEST: f64 = 600.0;

/// When to rest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CoolDown {
    /// So many seconds after each minute of work.
    Seconds(f64),
    /// When the hottest sensor is above so many degrees Celsius, until it is five below.
    Celsius(f64),
}

impl FromStr for CoolDown {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || {
            Error::config(
                format!("`{text}` says neither how long to rest nor from which temperature on"),
                "use --cool-down 10 for ten seconds after each minute of work, or --cool-down 85C for rests above 85 degrees",
            )
        };
        let number = |text: &str| text.parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0).ok_or_else(refused);
        match text.strip_suffix(['C', 'c']) {
            Some(degrees) => number(degrees).map(CoolDown::Celsius),
            None => number(text.strip_suffix('s').unwrap_or(text)).map(CoolDown::Seconds),
        }
    }
}

impl fmt::Display for CoolDown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CoolDown::Seconds(seconds) => write!(f, "{seconds}"),
            CoolDown::Celsius(degrees) => write!(f, "{degrees}C"),
        }
    }
}

/// Keeps a policy.
#[derive(Debug)]
pub(crate) struct Cooler {
    policy: CoolDown,
    worked: f64,
    rested: f64,
}

impl Cooler {
    /// # Errors
    /// For a temperature where no sensor can be read.
    pub(crate) fn new(policy: CoolDown) -> Result<Self> {
        Cooler::with(policy, hottest())
    }

    fn with(policy: CoolDown, sensor: Option<f64>) -> Result<Self> {
        if matches!(policy, CoolDown::Celsius(_)) && sensor.is_none() {
            return Err(Error::config(
                format!("--cool-down {policy}: no temperature sensor can be read here"),
                "use --cool-down SECONDS, which rests after each minute of work",
            ));
        }
        Ok(Cooler { policy, worked: 0.0, rested: 0.0 })
    }

    /// Seconds rested so far.
    pub(crate) fn rested(&self) -> f64 {
        self.rested
    }

    /// Counts `seconds` of work, and rests if it is time to; tells for how long.
    pub(crate) fn after(&mut self, seconds: f64, stop: &AtomicBool) -> f64 {
        let start = Instant::now();
        let mut pause = |seconds: f64| {
            let end = Instant::now() + Duration::from_secs_f64(seconds);
            while Instant::now() < end && !stop.load(Ordering::SeqCst) {
                std::thread::sleep(end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100)));
            }
            !stop.load(Ordering::SeqCst)
        };
        if !self.rest(seconds, &mut hottest, &mut pause) {
            return 0.0;
        }
        let rested = start.elapsed().as_secs_f64();
        self.rested += rested;
        rested
    }

    /// `pause` waits, and tells whether to go on.
    fn rest(
        &mut self,
        seconds: f64,
        sensor: &mut dyn FnMut() -> Option<f64>,
        pause: &mut dyn FnMut(f64) -> bool,
    ) -> bool {
        self.worked += seconds;
        let stretch = if matches!(self.policy, CoolDown::Seconds(_)) { STRETCH } else { LOOK };
        if self.worked < stretch {
            return false;
        }
        self.worked = 0.0;
        match self.policy {
            CoolDown::Seconds(seconds) => {
                pause(seconds);
                true
            }
            CoolDown::Celsius(limit) => {
                if sensor().is_none_or(|degrees| degrees <= limit) {
                    return false;
                }
                let mut waited = 0.0;
                while waited < LONGEST && sensor().is_some_and(|degrees| degrees > limit - BELOW) && pause(0.5) {
                    waited += 0.5;
                }
                true
            }
        }
    }
}

/// The hottest sensor of processors and graphics, in degrees Celsius.
fn hottest() -> Option<f64> {
    hottest_below(Path::new("/sys/class"))
}

fn hottest_below(class: &Path) -> Option<f64> {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let zones = entries(&class.join("thermal")).map(|zone| zone.join("temp"));
    let chips = entries(&class.join("hwmon")).flat_map(|chip| entries(&chip)).filter(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("temp") && name.ends_with("_input")
    });
    let degrees = zones.chain(chips).filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse::<f64>().ok());
    degrees.map(|t| t / 1000.0).filter(|t| (1.0..150.0).contains(t)).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_and_written() {
        for (text, policy) in [
            ("10", CoolDown::Seconds(10.0)),
            ("2.5s", CoolDown::Seconds(2.5)),
            ("85C", CoolDown::Celsius(85.0)),
            ("70.5c", CoolDown::Celsius(70.5)),
        ] {
            assert_eq!(text.parse::<CoolDown>().unwrap(), policy);
            assert_eq!(policy.to_string().parse::<CoolDown>().unwrap(), policy);
        }
        for text in ["", "C", "-3", "0", "hot", "infC", "85F"] {
            let message = text.parse::<CoolDown>().unwrap_err().to_string();
            assert!(message.contains("--cool-down 85C"), "{message}");
        }
    }

    #[test]
    fn a_rest_follows_each_minute_of_work() {
        let mut cooler = Cooler::with(CoolDown::Seconds(7.0), None).unwrap();
        let mut rests = Vec::new();
        for _ in 0..250 {
            cooler.rest(0.5, &mut || None, &mut |seconds| {
                rests.push(seconds);
                true
            });
        }
        assert_eq!(rests, [7.0, 7.0]);
    }

    #[test]
    fn a_hot_sensor_is_waited_for_until_it_is_five_degrees_below() {
        let mut cooler = Cooler::with(CoolDown::Celsius(80.0), Some(50.0)).unwrap();
        let mut readings = [79.0, 80.5, 80.5, 78.0, 76.0, 75.0, 99.0].into_iter();
        let mut waits = 0;
        assert!(!cooler.rest(1.0, &mut || readings.next(), &mut |_| unreachable!("79 degrees are fine")));
        assert!(!cooler.rest(0.4, &mut || unreachable!("not a second of work"), &mut |_| true));
        let rested = cooler.rest(1.0, &mut || readings.next(), &mut |_| {
            waits += 1;
            true
        });
        assert!(rested && waits == 3, "{waits}");
        assert_eq!(readings.next(), Some(99.0));
    }

    #[test]
    fn a_sensor_that_stays_hot_or_a_stop_ends_a_rest() {
        let mut cooler = Cooler::with(CoolDown::Celsius(80.0), Some(50.0)).unwrap();
        let mut waited = 0.0;
        cooler.rest(2.0, &mut || Some(120.0), &mut |seconds| {
            waited += seconds;
            true
        });
        assert_eq!(waited, LONGEST);
        let mut calls = 0;
        cooler.rest(2.0, &mut || Some(120.0), &mut |_| {
            calls += 1;
            false
        });
        assert_eq!(calls, 1);
    }

    #[test]
    fn a_temperature_without_a_sensor_is_refused_with_what_works() {
        let message = Cooler::with(CoolDown::Celsius(80.0), None).unwrap_err().to_string();
        assert!(message.contains("sensor") && message.contains("--cool-down SECONDS"), "{message}");
    }

    #[test]
    fn sensors_of_zones_and_chips_are_read_and_nonsense_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(hottest_below(dir.path()), None);
        write("thermal/thermal_zone0/temp", "41000\n");
        write("hwmon/hwmon1/temp1_input", "63500\n");
        write("hwmon/hwmon1/temp1_max", "99000\n");
        write("hwmon/hwmon2/temp1_input", "-273000\n");
        assert_eq!(hottest_below(dir.path()), Some(63.5));
    }
}
