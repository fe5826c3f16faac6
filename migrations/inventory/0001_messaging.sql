-- The messaging tables. Both services have them, each in its own database, and the two files that
-- create them are the same to the letter: `shared` runs the same SQL against either.

-- Messages this service has promised to publish. A row commits together with the change it tells
-- of, so the promise cannot be lost; the relay keeps it (shared/src/relay.rs).
CREATE TABLE outbox (
    -- The order of insertion, not of commit: a lower seq may become visible after a higher one.
    -- The relay therefore never remembers "how far it got".
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The event id, AMQP's message_id, the key of every consumer's inbox. Chosen once, at insert,
    -- and never changed: a new id would turn the same fact into a new event. The id of an event that
    -- follows from another is made of that one's ("<source id>:<what>"), so there cannot be two.
    id text NOT NULL UNIQUE CHECK (octet_length(id) BETWEEN 1 AND 200),
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    aggregate_version bigint NOT NULL CHECK (aggregate_version >= 1),
    event_type text NOT NULL,
    exchange text NOT NULL,
    routing_key text NOT NULL,
    -- The envelope as it is published, byte for byte: `json`, not `jsonb`, keeps the text.
    payload json NOT NULL,
    -- Trace context to publish as AMQP headers: an object of strings.
    headers jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Refusals of this very row (returned, nacked, not publishable). Trouble of the broker as a
    -- whole counts here never.
    attempts integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    last_error text,
    published_at timestamptz,
    parked_at timestamptz,
    -- One event for each version of an aggregate: the stream has neither holes nor forks.
    UNIQUE (aggregate_type, aggregate_id, aggregate_version),
    CHECK (published_at IS NULL OR parked_at IS NULL)
);

-- What is still to be sent. Partial, so that its size is the backlog's and not the history's.
CREATE INDEX outbox_unpublished ON outbox (seq) WHERE published_at IS NULL AND parked_at IS NULL;
-- "Is an older event of this aggregate still waiting (parked ones included)?"
CREATE INDEX outbox_unpublished_by_aggregate
    ON outbox (aggregate_type, aggregate_id, aggregate_version) WHERE published_at IS NULL;
-- What may be pruned.
CREATE INDEX outbox_published ON outbox (published_at) WHERE published_at IS NOT NULL;

-- The inbox: messages whose effect is in this database. The row commits together with the effect,
-- so a message that comes again finds it and does nothing (shared/src/inbox.rs).
CREATE TABLE processed_messages (
    consumer_name text NOT NULL,
    message_id text NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_name, message_id)
);

-- The version gate: the last version of each aggregate that a consumer has applied. It moves with
-- the effect, in one transaction, by exactly one at a time.
CREATE TABLE stream_versions (
    consumer_name text NOT NULL,
    aggregate_type text NOT NULL,
    aggregate_id text NOT NULL,
    version bigint NOT NULL CHECK (version >= 1),
    PRIMARY KEY (consumer_name, aggregate_type, aggregate_id)
);
