//! Tables of functions: what of a library is called, with its C signature.

/// Defines a struct of function pointers and how it is filled.
///
/// ```ignore
/// table! {
///     /// What of the C library is called.
///     pub(crate) struct C {
///         /// Length of a string.
///         strlen: fn(*const c_char) -> usize = "strlen";
///     } optional {
///         /// Only where it exists.
///         reallocarray: fn(*mut c_void, usize, usize) -> *mut c_void = "reallocarray";
///     }
/// }
/// let c = C::load(&library)?; // an error names the function that is missing
/// ```
///
/// The fields are plain `unsafe extern "C"` function pointers (optional ones in an `Option`), so a test makes a
/// table of functions of its own by a struct literal. A table is `Copy`, and valid for ever, because libraries are
/// never closed. The module that invokes it must allow `unsafe_code`; the signatures are that module's to get right.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$doc:meta])* $field:ident: fn($($arg:ty),* $(,)?) $(-> $out:ty)? = $symbol:literal;)*
        } $(optional {
            $($(#[$odoc:meta])* $ofield:ident: fn($($oarg:ty),* $(,)?) $(-> $oout:ty)? = $osymbol:literal;)*
        })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $name {
            $($(#[$doc])* $vis $field: unsafe extern "C" fn($($arg),*) $(-> $out)?,)*
            $($($(#[$odoc])* $vis $ofield: Option<unsafe extern "C" fn($($oarg),*) $(-> $oout)?>,)*)?
        }

        impl $name {
            /// Takes the functions from a library.
            $vis fn load(
                library: &$crate::libraries::Library,
            ) -> Result<Self, $crate::libraries::LibraryError> {
                Ok(Self {
                    // SAFETY: the signature is the one that the library's public header declares.
                    $($field: unsafe { library.function($symbol) }?,)*
                    // SAFETY: as above.
                    $($($ofield: unsafe { library.function($osymbol) }.ok(),)*)?
                })
            }
        }
    };
}
pub(crate) use table;

#[cfg(test)]
mod tests {
    #![allow(unsafe_code, reason = "functions of the C library are called")]

    use std::ffi::{c_char, c_int};
    use std::path::PathBuf;

    use crate::libraries::{Kind, Library, LibraryError};

    table! {
        struct Math {
            abs: fn(c_int) -> c_int = "abs";
            strlen: fn(*const c_char) -> usize = "strlen";
        } optional {
            absent: fn() = "no_such_function";
        }
    }

    table! {
        struct Absent {
            absent: fn() = "no_such_function";
        }
    }

    /// The C library that this very process runs on.
    fn libc() -> Library {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("/libc.so") || path.contains("/libc-") || path.contains("/ld-musl"));
        Library::open_at(Kind::Nvrtc, &PathBuf::from(path.expect("a C library"))).unwrap()
    }

    #[test]
    fn functions_are_found_and_called() {
        let table = Math::load(&libc()).unwrap();
        // SAFETY: functions of the C library, with a string that ends in a zero.
        let (abs, length) = unsafe { ((table.abs)(-3), (table.strlen)(c"four".as_ptr())) };
        assert_eq!((abs, length), (3, 4));
        assert!(table.absent.is_none());
    }

    #[test]
    fn a_missing_function_is_named() {
        let library = libc();
        let error = Absent::load(&library).map(|table| table.absent).unwrap_err();
        let expected = LibraryError::NoSymbol {
            kind: Kind::Nvrtc,
            path: library.path().to_owned(),
            symbol: "no_such_function",
        };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("has no function `no_such_function`"));
    }
}
