//! What addresses are called: names whose addresses the sandbox was told.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The one that was told first is forgotten first.
const ADDRESSES_MAX: usize = 4096;
/// Of one address.
const NAMES_MAX: usize = 8;
/// Some programs ask once and keep the answer; an address may have another owner some day.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);

const LOOK_UP_EVERY: Duration = Duration::from_secs(30);

struct Name {
    name: String,
    told: Instant,
}

#[derive(Default)]
pub(super) struct Known {
    names: HashMap<IpAddr, Vec<Name>>,
    order: VecDeque<IpAddr>,
    looked_up: Option<Instant>,
}

impl Known {
    /// True: the caller does it now.
    pub fn may_look_up(&mut self) -> bool {
        let may = self.looked_up.is_none_or(|last| last.elapsed() >= LOOK_UP_EVERY);
        if may {
            self.looked_up = Some(Instant::now());
        }
        may
    }

    pub fn learn(&mut self, name: &str, ips: &[IpAddr]) {
        for ip in ips {
            let known = self.names.entry(*ip).or_insert_with(|| {
                self.order.push_back(*ip);
                Vec::new()
            });
            known.retain(|other| !other.name.eq_ignore_ascii_case(name));
            if known.len() == NAMES_MAX {
                known.remove(0);
            }
            known.push(Name { name: name.to_owned(), told: Instant::now() });
        }
        while self.order.len() > ADDRESSES_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.names.remove(&oldest);
            }
        }
    }

    /// The last that was told first.
    pub fn of(&self, ip: IpAddr) -> Vec<String> {
        let known = self.names.get(&ip).into_iter().flatten().rev();
        known.filter(|name| name.told.elapsed() < AGE_MAX).map(|name| name.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_was_told_is_known_and_bounded() {
        let mut known = Known::default();
        let ip = |n: u32| IpAddr::from(Ipv4Addr::from(n));
        known.learn("a.example", &[ip(1), ip(2)]);
        known.learn("b.example", &[ip(2)]);
        known.learn("A.example", &[ip(2)]);
        assert_eq!(known.of(ip(1)), ["a.example"]);
        assert_eq!(known.of(ip(2)), ["A.example", "b.example"]);
        assert!(known.of(ip(3)).is_empty());
        for n in 0..20 {
            known.learn(&format!("{n}.example"), &[ip(3)]);
        }
        assert_eq!(known.of(ip(3)).len(), NAMES_MAX);
        for n in 10..10 + u32::try_from(ADDRESSES_MAX).unwrap() {
            known.learn("many.example", &[ip(n)]);
        }
        assert!(known.of(ip(1)).is_empty() && known.of(ip(3)).is_empty());
        assert_eq!((known.names.len(), known.order.len()), (ADDRESSES_MAX, ADDRESSES_MAX));
    }
}
