-- Orders: owned by orders-service, read and written by nobody else.

CREATE TABLE orders (
    -- UUID v7: sorts by time of creation, which is what the keyset pages walk along.
    id uuid PRIMARY KEY,
    status text NOT NULL,
    -- Bumped by every change of status. Each bump writes one outbox row with this version.
    version bigint NOT NULL CHECK (version >= 1),
    customer_id text,
    -- Why inventory said no.
    rejection_reason text,
    rejected_sku text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT orders_status_known CHECK (status IN ('created', 'confirmed', 'rejected', 'cancelled')),
    CONSTRAINT orders_rejected_with_reason
        CHECK ((status = 'rejected') = (rejection_reason IS NOT NULL))
);
CREATE INDEX orders_by_status ON orders (status, id DESC);

CREATE TABLE order_lines (
    order_id uuid NOT NULL REFERENCES orders,
    -- COLLATE "C": sorted by bytes, as the code sorts, whatever the database's language.
    sku text COLLATE "C" NOT NULL CHECK (sku ~ '^[A-Za-z0-9._-]{1,64}$'),
    count integer NOT NULL CHECK (count BETWEEN 1 AND 10000),
    -- One line a sku: two lines of one sku were added up before they came here.
    PRIMARY KEY (order_id, sku)
);

-- One row for each Idempotency-Key that made an order. It commits with the order: a client that
-- never saw the answer asks again with its key and gets the same one.
CREATE TABLE idempotency_keys (
    key text PRIMARY KEY CHECK (octet_length(key) BETWEEN 1 AND 255),
    -- The order that was asked for, in canonical form: the same key with another request is a
    -- mistake of the client's, and is told so.
    request jsonb NOT NULL,
    -- The body that was answered, as text, to be answered again.
    response text NOT NULL,
    -- The key is claimed first and the order inserted after it, hence deferred to the COMMIT.
    order_id uuid NOT NULL REFERENCES orders DEFERRABLE INITIALLY DEFERRED,
    created_at timestamptz NOT NULL DEFAULT now()
);
