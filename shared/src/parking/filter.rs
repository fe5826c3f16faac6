//! Which parked messages are meant: the filters of `list`, `redrive` and `discard`, on the command
//! line and over the operations API alike. Nothing given means all.

use super::parked::About;
use crate::failure::Class;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use serde::{Deserialize, Deserializer, Serialize};

/// All that is given must fit. Texts are compared as they are.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[group(skip)]
pub struct Filter {
    /// Only the message with this id; repeat it for more
    #[arg(long = "id")]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub id: Vec<String>,
    /// Only events of this type, like order.created
    #[arg(long = "type")]
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// Only events of the aggregate with this id, an order for example
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregate: Option<String>,
    /// Only those whose last failure was of this class
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// Only those parked for this reason, like attempts-exhausted or delivery_limit
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Only those parked before this: a time like 2026-07-21T09:00:00Z, or how long ago, like 2h. A
    /// message whose time is not known is never meant
    #[arg(long, value_parser = moment)]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read_moment")]
    pub before: Option<DateTime<Utc>>,
    /// Only those parked since then, in the same forms
    #[arg(long, value_parser = moment)]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read_moment")]
    pub after: Option<DateTime<Utc>>,
}

impl Filter {
    /// The filter for one message.
    #[must_use]
    pub fn of(id: String) -> Self {
        Self { id: vec![id], ..Self::default() }
    }

    /// For what cannot be taken back: somebody must have said what is meant.
    ///
    /// # Errors
    /// When it means all.
    pub fn refuse_all(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            *self != Self::default(),
            "to discard takes at least one filter: id, type, aggregate, class, reason, before, after"
        );
        Ok(())
    }

    /// Whether it means this one.
    #[must_use]
    pub fn fits(&self, about: &About) -> bool {
        let fits = |wanted: &Option<String>, is: &Option<String>| wanted.is_none() || wanted == is;
        let id = about.message_id.as_ref();
        (self.id.is_empty() || id.is_some_and(|id| self.id.contains(id)))
            && fits(&self.event_type, &about.event_type)
            && fits(&self.aggregate, &about.aggregate_id)
            && (self.class.is_none() || self.class == about.class)
            && fits(&self.reason, &about.reason)
            && self.before.is_none_or(|before| about.parked_at.is_some_and(|at| at < before))
            && self.after.is_none_or(|after| about.parked_at.is_some_and(|at| at >= after))
    }
}

/// A point in time, or a duration that ends now.
fn moment(text: &str) -> Result<DateTime<Utc>, String> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Ok(time.to_utc());
    }
    let ago = humantime::parse_duration(text).ok().and_then(|ago| TimeDelta::from_std(ago).ok());
    ago.and_then(|ago| Utc::now().checked_sub_signed(ago)).ok_or_else(|| {
        format!("{text:?} is neither a time like 2026-07-21T09:00:00Z nor how long ago, like 2h")
    })
}

/// [`moment`] for JSON and for query strings.
pub(super) fn read_moment<'de, D: Deserializer<'de>>(
    json: D,
) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text: Option<String> = Deserialize::deserialize(json)?;
    text.map(|text| moment(&text).map_err(serde::de::Error::custom)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About {
        About {
            message_id: Some("m1".into()),
            event_type: Some("order.created".into()),
            aggregate_id: Some("42".into()),
            class: Some(Class::NotYet),
            reason: Some("gap-deadline".into()),
            parked_at: moment("2026-07-21T09:00:00Z").ok(),
            ..About::default()
        }
    }

    #[test]
    fn everything_that_is_asked_must_fit_and_nothing_asked_fits_all() {
        for (filter, fits) in [
            (r"{}", true),
            (r#"{"id":["m1"]}"#, true),
            (r#"{"id":["m0","m1"]}"#, true),
            (r#"{"id":["m0"]}"#, false),
            (r#"{"type":"order.created"}"#, true),
            (r#"{"type":"order"}"#, false),
            (r#"{"aggregate":"42"}"#, true),
            (r#"{"aggregate":"43"}"#, false),
            (r#"{"class":"not_yet"}"#, true),
            (r#"{"class":"permanent"}"#, false),
            (r#"{"reason":"gap-deadline"}"#, true),
            (r#"{"reason":"permanent"}"#, false),
            // From `after` on, up to `before`.
            (r#"{"before":"2026-07-21T09:00:00Z"}"#, false),
            (r#"{"before":"2026-07-21T11:00:00.001+02:00"}"#, true),
            (r#"{"after":"2026-07-21T09:00:00Z"}"#, true),
            (r#"{"after":"2026-07-21T09:00:00.001Z"}"#, false),
            (r#"{"id":["m1"],"type":"order.created","class":"permanent"}"#, false),
        ] {
            let read: Filter = serde_json::from_str(filter).expect(filter);
            assert_eq!(read.fits(&about()), fits, "{filter}");
            assert_eq!(read.refuse_all().is_err(), filter == "{}", "{filter}");
            // As the audit keeps it.
            let kept = serde_json::to_string(&read).expect(filter);
            assert_eq!(serde_json::from_str::<Filter>(&kept).expect(&kept), read);
        }
    }

    #[test]
    fn what_is_not_known_of_a_message_fits_no_filter_that_asks_for_it() {
        let nothing = About::default();
        assert!(Filter::default().fits(&nothing));
        for filter in [
            r#"{"id":[""]}"#,
            r#"{"type":""}"#,
            r#"{"aggregate":""}"#,
            r#"{"class":"unknown"}"#,
            r#"{"reason":""}"#,
            r#"{"before":"2999-01-01T00:00:00Z"}"#,
            r#"{"after":"1000w"}"#,
        ] {
            let read: Filter = serde_json::from_str(filter).expect(filter);
            assert!(!read.fits(&nothing), "{filter}");
        }
    }

    #[test]
    fn a_duration_is_that_long_ago() {
        let ago = Utc::now() - moment("2h").expect("a moment");
        assert!((7199..7260).contains(&ago.num_seconds()), "{ago}");
        for bad in ["", "soon", "2", "-2h", "2026-07-21", "2026-13-01T00:00:00Z", "9999999999y"] {
            assert!(moment(bad).is_err_and(|error| error.contains("like 2h")), "{bad:?}");
        }
    }
}
