//! Decisions without I/O: what a sandbox may reach.
//!
//! A decision is about an address, after resolution: whoever connects must connect to exactly the
//! address that was decided on, so that a name cannot change its meaning in between.
//!
//! Order of the rules:
//!
//! 1. Addresses that are not of the public internet (private, link-local, metadata…) need an `allow`
//!    network within such a block; the host's own addresses need one that is exactly that address (or
//!    lies within loopback). A wide network (`0.0.0.0/0`) or a name never opens them: the name's
//!    owner decides what it resolves to.
//! 2. An `allow` rule (network, address, domain, `*.domain`) that matches.
//! 3. A `deny` rule that matches.
//! 4. `internet`.

mod network;

use std::fmt;
use std::net::IpAddr;

use dormouse_wire::keeper::EgressRules;

pub use network::{Network, embedded, special};

/// More rules of one kind are refused.
pub const RULES_MAX: usize = 1024;

/// A rule was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    #[error("the {list} rule {rule:?} is not {wanted}")]
    Rule { list: &'static str, rule: String, wanted: &'static str },
    #[error("{count} {list} rules were given: at most {RULES_MAX} are taken")]
    TooMany { list: &'static str, count: usize },
}

/// What a connection goes to, after resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    /// The name that was asked for, if it was one.
    pub host: Option<&'a str>,
    pub ip: IpAddr,
    /// 0 where only the address matters (DNS).
    pub port: u16,
    /// Whether `ip` is one of the host's own addresses.
    pub is_host: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Allow,
    Deny(Why),
}

/// Why a connection is denied; Display is meant for the person inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    Special(&'static str),
    HostsOwn,
    Rule(String),
    NoInternet,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Special(what) => {
                write!(f, "it is a {what} address; the sandbox's owner can allow it by its network")
            }
            Self::HostsOwn => f.write_str("it is an address of the host itself"),
            Self::Rule(rule) => write!(f, "the rule {rule} denies it"),
            Self::NoInternet => f.write_str("this sandbox has no internet access and no rule allows it"),
        }
    }
}

/// A lower-case name; with `below`, everything below it and not the name itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Domain {
    name: String,
    below: bool,
}

/// Rules, ready to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressPolicy {
    internet: bool,
    allow_networks: Vec<Network>,
    allow_domains: Vec<Domain>,
    deny: Vec<Network>,
}

impl EgressPolicy {
    pub fn compile(rules: &EgressRules) -> Result<Self, RuleError> {
        for (list, rules) in [("allow", &rules.allow), ("deny", &rules.deny)] {
            if rules.len() > RULES_MAX {
                return Err(RuleError::TooMany { list, count: rules.len() });
            }
        }
        let mut policy = Self {
            internet: rules.internet,
            allow_networks: Vec::new(),
            allow_domains: Vec::new(),
            deny: Vec::new(),
        };
        for rule in &rules.allow {
            if let Some(network) = Network::parse(rule) {
                policy.allow_networks.push(network);
            } else if let Some(domain) = Domain::parse(rule) {
                policy.allow_domains.push(domain);
            } else {
                let wanted = "an address, a network (CIDR), a domain or *.domain";
                return Err(RuleError::Rule { list: "allow", rule: shorten(rule), wanted });
            }
        }
        for rule in &rules.deny {
            let wanted = "an address or a network (CIDR)";
            let network =
                Network::parse(rule).ok_or(RuleError::Rule { list: "deny", rule: shorten(rule), wanted })?;
            policy.deny.push(network);
        }
        Ok(policy)
    }

    /// Whether asking for the name can lead anywhere: no query leaves a sandbox that may reach nothing.
    #[must_use]
    pub fn may_resolve(&self, name: &str) -> bool {
        self.internet || !self.allow_networks.is_empty() || self.names(name)
    }

    /// Whole names that are allowed, at most `max`: whoever sees only an address can ask what theirs are.
    pub fn whole_names(&self, max: usize) -> impl Iterator<Item = &str> {
        self.allow_domains.iter().filter(|domain| !domain.below).map(|domain| domain.name.as_str()).take(max)
    }

    fn names(&self, name: &str) -> bool {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        self.allow_domains.iter().any(|domain| domain.matches(&name))
    }

    #[must_use]
    pub fn decide(&self, target: &Target<'_>) -> Decision {
        let ip = target.ip.to_canonical();
        let special = special(ip);
        if target.is_host || special.is_some() {
            let opens = |network: &Network| {
                network.contains(ip)
                    && if target.is_host && !ip.is_loopback() {
                        network.is_single()
                    } else {
                        network.is_special()
                    }
            };
            return if self.allow_networks.iter().any(opens) {
                Decision::Allow
            } else if target.is_host && !ip.is_loopback() {
                Decision::Deny(Why::HostsOwn)
            } else {
                Decision::Deny(Why::Special(special.unwrap_or("host")))
            };
        }
        let by_network = self.allow_networks.iter().any(|network| network.contains(ip));
        if by_network || target.host.is_some_and(|host| self.names(host)) {
            return Decision::Allow;
        }
        if let Some(rule) = self.deny.iter().find(|network| network.contains(ip)) {
            return Decision::Deny(Why::Rule(rule.to_string()));
        }
        if self.internet { Decision::Allow } else { Decision::Deny(Why::NoInternet) }
    }
}

fn shorten(rule: &str) -> String {
    rule.chars().take(120).collect()
}

impl Domain {
    fn parse(rule: &str) -> Option<Self> {
        let lower = rule.trim_end_matches('.').to_ascii_lowercase();
        let (below, name) = match lower.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, lower.as_str()),
        };
        let is_label = |label: &str| {
            !label.is_empty()
                && label.len() <= 63
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        // A last label of digits is an address that was mistyped, never a name.
        let last_is_name = name.rsplit('.').next().is_some_and(|l| l.bytes().any(|b| !b.is_ascii_digit()));
        let fits = name.len() <= 253 && name.split('.').all(is_label) && last_is_name;
        fits.then(|| Self { name: name.to_owned(), below })
    }

    fn matches(&self, name: &str) -> bool {
        if self.below {
            name.strip_suffix(&self.name).is_some_and(|head| head.len() > 1 && head.ends_with('.'))
        } else {
            name == self.name
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(internet: bool, allow: &[&str], deny: &[&str]) -> EgressPolicy {
        let own = |list: &[&str]| list.iter().map(|rule| (*rule).to_owned()).collect();
        EgressPolicy::compile(&EgressRules { internet, allow: own(allow), deny: own(deny) }).unwrap()
    }

    fn allows(policy: &EgressPolicy, host: Option<&str>, ip: &str) -> bool {
        let target = Target { host, ip: ip.parse().unwrap(), port: 443, is_host: false };
        policy.decide(&target) == Decision::Allow
    }

    const SPECIAL: &[&str] = &[
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.9.9.9",
        "169.254.169.254",
        "168.63.129.16",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fd00:ec2::254",
        "fc00::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001:0:53aa:64c::1",
    ];

    #[test]
    fn special_addresses_are_denied_whatever_is_wide_open() {
        let open = policy(true, &["0.0.0.0/0", "::/0", "evil.example", "*.example"], &[]);
        for ip in SPECIAL {
            assert!(!allows(&open, Some("evil.example"), ip), "{ip} was allowed");
            assert!(!allows(&open, None, ip), "{ip} was allowed");
        }
        for ip in
            ["1.1.1.1", "172.32.0.1", "203.0.113.80", "2606:4700::1111", "64:ff9b::101:101", "100.128.0.1"]
        {
            assert!(allows(&open, None, ip), "{ip} was denied");
        }
    }

    #[test]
    fn a_named_network_opens_what_lies_within_a_special_block() {
        let lan = policy(false, &["10.1.0.0/16", "127.0.0.1", "fd00::/8"], &[]);
        for (ip, wanted) in [
            ("10.1.2.3", true),
            ("10.2.0.1", false),
            ("127.0.0.1", true),
            ("::ffff:127.0.0.1", true),
            ("127.0.0.2", false),
            ("fd12::1", true),
            ("1.1.1.1", false),
        ] {
            assert_eq!(allows(&lan, None, ip), wanted, "{ip}");
        }
    }

    #[test]
    fn the_hosts_own_addresses_need_their_very_address() {
        let target = Target { host: None, ip: "203.0.114.7".parse().unwrap(), port: 80, is_host: true };
        assert_eq!(policy(true, &["203.0.114.0/24"], &[]).decide(&target), Decision::Deny(Why::HostsOwn));
        assert_eq!(policy(false, &["203.0.114.7"], &[]).decide(&target), Decision::Allow);
    }

    #[test]
    fn allow_beats_deny_and_deny_beats_internet() {
        let rules = policy(true, &["api.example.org", "*.cdn.example", "8.8.8.8"], &["0.0.0.0/0"]);
        for (host, ip, wanted) in [
            (Some("API.example.org."), "93.184.216.34", true),
            (Some("example.org"), "93.184.216.34", false),
            (Some("a.cdn.example"), "93.184.216.34", true),
            (Some("a.b.cdn.example"), "2606:4700::1", true),
            (Some("cdn.example"), "93.184.216.34", false),
            (Some("evilcdn.example"), "93.184.216.34", false),
            (None, "8.8.8.8", true),
            (None, "8.8.4.4", false),
            // "Everything" means both families.
            (None, "2606:4700::1", false),
        ] {
            assert_eq!(allows(&rules, host, ip), wanted, "{host:?} {ip}");
        }
    }

    #[test]
    fn names_are_asked_only_where_an_answer_can_be_used() {
        assert!(!policy(false, &[], &[]).may_resolve("example.org"));
        assert!(!policy(false, &["other.org"], &[]).may_resolve("example.org"));
        assert!(policy(false, &["example.org"], &[]).may_resolve("Example.org."));
        assert!(policy(true, &[], &[]).may_resolve("example.org"));
    }

    #[test]
    fn rules_that_mean_nothing_are_refused_by_name() {
        for rule in ["", "1.2.3", "10.0.0.0/33", "a..b", "*", "*.", "http://x.org", "x.org/24", "fe80::1/129"]
        {
            let rules = EgressRules { internet: true, allow: vec![rule.into()], deny: Vec::new() };
            assert!(EgressPolicy::compile(&rules).is_err(), "{rule:?} was taken");
        }
        let deny = EgressRules { internet: true, allow: Vec::new(), deny: vec!["example.org".into()] };
        let error = EgressPolicy::compile(&deny).unwrap_err().to_string();
        assert!(error.contains("example.org"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_compiler_panic(rule in ".{0,60}") {
            let rules = EgressRules { internet: false, allow: vec![rule.clone()], deny: vec![rule] };
            let _ = EgressPolicy::compile(&rules);
        }

        #[test]
        fn embedding_an_address_never_opens_it(ip in any::<u32>()) {
            let v4 = std::net::Ipv4Addr::from(ip);
            let [a, b, c, d] = v4.octets();
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            let plain = special(IpAddr::V4(v4)).is_some();
            for v6 in [
                v4.to_ipv6_mapped(),
                std::net::Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                std::net::Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            ] {
                prop_assert_eq!(special(IpAddr::V6(v6)).is_some(), plain, "{}", v6);
            }
        }
    }
}
