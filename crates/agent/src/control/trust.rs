//! Certificates that the sandbox shall trust beside its own: written to where the distributions' tools
//! look, and named in variables for the programs that bring their own list.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::files::{read, with_block, write};

const PEM_BYTES_MAX: usize = 256 << 10;
const BEGIN: &str = "# dormouse: trusted CA";
const END: &str = "# dormouse: end of trusted CA";
const CERTIFICATE: &str = "/usr/local/share/ca-certificates/dormouse.crt";
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Whether this can be a PEM file of certificates; says why not.
pub fn check(pem: &str) -> Result<(), String> {
    if pem.len() > PEM_BYTES_MAX {
        return Err(format!("trusted_ca has {} bytes, more than {PEM_BYTES_MAX}", pem.len()));
    }
    if !pem.contains("-----BEGIN CERTIFICATE-----") || !pem.contains("-----END CERTIFICATE-----") {
        return Err("trusted_ca holds no PEM certificate".to_owned());
    }
    if pem.lines().any(|line| line == BEGIN || line == END) {
        return Err("trusted_ca holds a mark of Dormouse's own".to_owned());
    }
    Ok(())
}

/// Makes `pem` the only addition to the trusted certificates; `None`: there is none.
pub fn install(root: &Path, pem: Option<&str>) -> io::Result<()> {
    let below = |path: &str| root.join(path.trim_start_matches('/'));
    let bundle = read(&below(BUNDLE))?;
    match pem {
        Some(pem) => write(&below(CERTIFICATE), pem)?,
        None if !bundle.lines().any(|line| line == BEGIN) => return Ok(()),
        None => match std::fs::remove_file(below(CERTIFICATE)) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        },
    }
    write(&below(BUNDLE), &with_block(&bundle, BEGIN, END, pem.unwrap_or("")))
}

/// Variables of what is started while there is such a certificate.
#[must_use]
pub fn variables() -> BTreeMap<String, String> {
    let bundle = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"];
    let mut all: BTreeMap<String, String> =
        bundle.iter().map(|name| ((*name).to_owned(), BUNDLE.to_owned())).collect();
    all.insert("NODE_EXTRA_CA_CERTS".to_owned(), CERTIFICATE.to_owned());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nQQ==\n-----END CERTIFICATE-----\n";

    #[test]
    fn certificates_come_and_go_without_a_trace() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join("etc/ssl/certs/ca-certificates.crt");
        fs::create_dir_all(bundle.parent().unwrap()).unwrap();
        fs::write(&bundle, "system\n").unwrap();
        for _ in 0..2 {
            install(root.path(), Some(PEM)).unwrap();
        }
        let text = fs::read_to_string(&bundle).unwrap();
        assert_eq!((text.matches(PEM.trim()).count(), text.starts_with("system\n")), (1, true));
        install(root.path(), None).unwrap();
        assert_eq!(fs::read_to_string(&bundle).unwrap(), "system\n");
        assert!(!root.path().join(CERTIFICATE.trim_start_matches('/')).exists());
    }

    #[test]
    fn only_certificates_are_taken() {
        assert!(check(PEM).is_ok());
        assert!(check("-----BEGIN PRIVATE KEY-----").is_err());
        assert!(check(&format!("{PEM}{END}\n")).is_err());
        assert!(check(&PEM.repeat(10_000)).is_err());
    }
}
