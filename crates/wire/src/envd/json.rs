//! Fields of protobuf JSON that serde does not write that way by itself.

use serde::{Deserialize, Deserializer, Serializer};

/// True for the value that protobuf JSON omits.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `bytes` as base64: standard alphabet with padding; on input the URL alphabet and no padding too.
pub mod bytes64 {
    use base64::Engine as _;
    use base64::alphabet;
    use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
    use bytes::Bytes;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
    const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

    pub fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        decode(&std::borrow::Cow::<'_, str>::deserialize(deserializer)?).map_err(D::Error::custom)
    }

    fn decode(text: &str) -> Result<Bytes, String> {
        let engine = if text.contains(['-', '_']) { &URL_SAFE } else { &STANDARD };
        engine.decode(text).map(Bytes::from).map_err(|why| format!("not base64: {why}"))
    }

    /// The same for a field of a oneof.
    pub mod option {
        use serde::de::Error as _;

        use super::{Bytes, Deserialize, Deserializer, Serializer, decode};

        pub fn serialize<S: Serializer>(bytes: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
            match bytes {
                Some(bytes) => super::serialize(bytes, serializer),
                None => serializer.serialize_none(),
            }
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
            let text = Option::<std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
            text.map(|text| decode(&text)).transpose().map_err(D::Error::custom)
        }
    }
}

/// `null` is the default, as in protobuf JSON.
pub fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// `int64` as a string; a number is accepted.
pub mod int64 {
    use super::{Deserialize, Deserializer, Serializer};
    use serde::de::Error as _;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Number(i64),
        Text(String),
    }

    pub fn serialize<S: Serializer>(value: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.to_string())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        match Given::deserialize(deserializer)? {
            Given::Number(number) => Ok(number),
            Given::Text(text) => text.parse().map_err(|_| D::Error::custom("not a 64-bit integer")),
        }
    }
}
