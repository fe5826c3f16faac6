-- Stock and reservations: owned by inventory-service, read and written by nobody else.

CREATE TABLE stock (
    -- COLLATE "C": sorted by bytes, as the code sorts, whatever the database's language.
    sku text COLLATE "C" PRIMARY KEY CHECK (sku ~ '^[A-Za-z0-9._-]{1,64}$'),
    -- What is on the shelf; `available - reserved` of it is free to be promised.
    available bigint NOT NULL CHECK (available BETWEEN 0 AND 1000000000),
    reserved bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),
    -- The last line of defence: whatever the code does, nothing is promised that is not there.
    CONSTRAINT stock_reserved_within_available CHECK (0 <= reserved AND reserved <= available)
);

CREATE TABLE reservations (
    order_id text NOT NULL CHECK (octet_length(order_id) BETWEEN 1 AND 200),
    sku text COLLATE "C" NOT NULL,
    count integer NOT NULL CHECK (count BETWEEN 1 AND 10000),
    -- 'rejected' rows are kept too: they answer GET /reservations and make "no" as lasting as "yes".
    status text NOT NULL CHECK (status IN ('reserved', 'released', 'rejected')),
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    -- The business key: one reservation for an order and a sku, for ever. It protects the stock
    -- even where inbox and gate have lost a message (a restored backup, a retention too short).
    PRIMARY KEY (order_id, sku)
);
