# SPDX-License-Identifier: Apache-2.0
"""The joined description: every signature with its semantics row, and the plan that follows for each parameter.

load() reads the four tables of proto/api (through the schema's generated Python module), joins them by exported symbol
and applies the default rules of defaults.py. The emitters work on the result and know nothing of any single call.
"""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tempfile

FIRST_OPERATION = 0x10000


def load_schema(api_dir):
    """The Python module of schema.proto, compiled on the fly into a temporary folder."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(["protoc", f"--proto_path={api_dir}", f"--python_out={out}", "schema.proto"], check=True)
        sys.path.insert(0, out)
        try:
            return importlib.import_module("schema_pb2")
        finally:
            sys.path.pop(0)


@dataclasses.dataclass
class Field:
    """One field of a wire message."""
    name: str
    type: str            # proto scalar type, 'handles' (repeated fixed64, kept as raw bytes), or a message's name
    number: int
    repeated: bool = False
    optional: bool = False
    comment: str = ""


@dataclasses.dataclass
class Message:
    name: str
    fields: list
    comment: str = ""


@dataclasses.dataclass
class Param:
    """A parameter of a call and what the generated code does with it."""
    index: int
    type: str            # as in the signature
    name: str
    base: str            # type without const and stars
    cls: str             # class of the base type
    stars: int
    const: bool
    role: str = ""       # see defaults.py
    kind: str = ""       # handles: kind of object
    also: str = ""
    error: str = "CUDA_ERROR_INVALID_HANDLE"  # handles: the answer for one that is none
    parent: str = ""
    depends: tuple = ()
    optional: bool = False
    count: str = ""      # arrays: element count, bytes: size; an expression over parameters
    direction: str = ""  # in or out
    struct: object = None

    @property
    def value_type(self):
        return self.base


@dataclasses.dataclass
class Call:
    """One ABI version of a call, joined."""
    sig: object
    row: object          # semantics row or None
    family: object
    params: list
    status: str = ""     # generated, client, server, both, local, forward, unsupported
    reason: str = ""
    errors: list = dataclasses.field(default_factory=list)
    request: Message = None
    reply: Message = None
    context: str = "thread"  # whose context it is made in: none, thread, object

    @property
    def traits(self):
        """The row's Traits; None if it has none."""
        return self.row.traits if self.row is not None and self.row.HasField("traits") else None

    @property
    def symbol(self):
        return self.sig.symbol

    @property
    def id(self):
        return self.sig.id

    @property
    def per_thread(self):
        return self.sig.per_thread.suffix

    @property
    def has_wire(self):
        return self.request is not None

    @property
    def has_body(self):
        """Whether the client library does something for it: it is neither unsupported nor the same as another call."""
        return self.status not in ("unsupported", "forward")

    @property
    def client_custom(self):
        return self.status in ("client", "both", "local")

    @property
    def server_custom(self):
        return self.status in ("server", "both")

    @property
    def member(self):
        """Name of the function pointer in the driver table: a macro of cuda.h cannot be a member's name."""
        return self.symbol + ("_v1" if self.sig.macro and self.sig.abi == 1 else "")

    def param(self, name):
        for param in self.params:
            if param.name == name:
                return param
        return None

    def declaration(self, per_thread=False):
        """The C++ parameter list."""
        parts = [f"{cpp_type(p.type)}{p.name}" for p in self.params]
        if per_thread:
            parts.append("bool per_thread")
        return ", ".join(parts)

    def arguments(self, *extra):
        return ", ".join([p.name for p in self.params] + list(extra))


def cpp_type(text):
    """The type as it stands before a name: 'const char *' needs no space, 'int' does."""
    return text if text.endswith("*") else text + " "


@dataclasses.dataclass
class Operation:
    number: int
    name: str
    comment: str
    event: bool
    request: Message
    reply: Message
    traits: object = None
    context: str = "none"

    @property
    def id(self):
        return FIRST_OPERATION + self.number

    @property
    def symbol(self):
        return "Op" + self.name


class Model:
    def __init__(self):
        self.schema = None       # module of schema.proto
        self.cuda_version = 0
        self.calls = []
        self.undocumented = []
        self.types = {}
        self.handles = {}
        self.structs = {}
        self.families = []
        self.messages = []       # shared message types of the operations
        self.operations = []
        self.errors = []

    def by_symbol(self, symbol):
        return self._symbols.get(symbol)

    def family_calls(self, name):
        return [c for c in self.calls if c.family.name == name]

    def requests(self):
        """Everything that has a request which the client sends: calls and operations."""
        return [c for c in self.calls if c.has_wire] + [o for o in self.operations if not o.event]

    def index(self):
        self._symbols = {c.symbol: c for c in self.calls}


def fields_from(proto_fields):
    return [Field(f.name, f.type, f.number, f.repeated, f.optional, f.comment) for f in proto_fields]


def parse(schema, message, path):
    from google.protobuf import text_format
    with open(path, encoding="utf-8") as f:
        try:
            return text_format.Parse(f.read(), message)
        except text_format.ParseError as error:
            raise SystemExit(f"{path}: {error}")


def load(api_dir):
    """Reads and joins the tables. Problems end up in model.errors and call.errors; lint.py reports them."""
    from proto_gen import defaults
    schema = load_schema(api_dir)
    signatures = parse(schema, schema.Signatures(), os.path.join(api_dir, "signatures.textproto"))
    semantics = parse(schema, schema.Semantics(), os.path.join(api_dir, "semantics.textproto"))
    structs = parse(schema, schema.Structs(), os.path.join(api_dir, "structs.textproto"))
    operations = parse(schema, schema.Operations(), os.path.join(api_dir, "operations.textproto"))
    return join(schema, signatures, semantics, structs, operations, defaults)


def join(schema, signatures, semantics, structs, operations, defaults):
    model = Model()
    model.schema = schema
    model.cuda_version = signatures.cuda_version
    class_name = schema.Type.DESCRIPTOR.enum_types_by_name["Class"].values_by_number
    for entry in signatures.type:
        model.types[entry.name] = (class_name[getattr(entry, "class")].name, entry.repr)
    model.handles = {h.type: h for h in structs.handle}
    for rule in structs.struct:
        for name in rule.type:
            if name in model.structs:
                model.errors.append(f"struct {name}: two rules")
            model.structs[name] = rule
    model.families = list(structs.family)
    prefixes = sorted(((p, f) for f in structs.family for p in f.prefix), key=lambda e: -len(e[0]))

    rows = {}
    for row in semantics.call:
        for name in row.name:
            if name in rows:
                model.errors.append(f"{name}: two semantics rows")
            rows[name] = row
    for sig in signatures.signature:
        family = next((f for p, f in prefixes if sig.symbol.startswith(p)), None)
        if family is None:
            model.errors.append(f"{sig.symbol}: no family has a prefix of it")
            continue
        params = [make_param(model, i, p) for i, p in enumerate(sig.param)]
        model.calls.append(Call(sig, rows.pop(sig.symbol, None), family, params))
    for name in rows:
        model.errors.append(f"{name}: a semantics row for a call that does not exist")
    model.calls.sort(key=lambda c: c.id)
    model.undocumented = list(signatures.undocumented)
    model.index()

    model.messages = [Message(m.name, fields_from(m.field), m.comment) for m in operations.message]
    for op in sorted(operations.operation, key=lambda o: o.number):
        model.operations.append(Operation(
            op.number, op.name, op.comment, op.event,
            Message(f"Op{op.name}_Request", fields_from(op.request)),
            None if op.event else Message(f"Op{op.name}_Reply", fields_from(op.reply)),
            op.traits if op.HasField("traits") else None, "thread" if op.context == schema.Row.NEEDED else "none"))
    for call in model.calls:
        defaults.plan(model, call, schema)
    return model


def make_param(model, index, param):
    base = re.sub(r"\bconst\b|\*", " ", param.type)
    base = re.sub(r"\s+", " ", base).strip()
    stars = param.type.count("*")
    cls = "VOID" if base == "void" else model.types.get(base, ("UNKNOWN", ""))[0]
    return Param(index, param.type, param.name, base, cls, stars, "const" in param.type)
